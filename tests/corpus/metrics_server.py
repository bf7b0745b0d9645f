# SPDX-License-Identifier: Apache-2.0
"""Posts its metrics to a server, here one of its own in a thread, which counts what arrives and may tell it to stop."""
import json
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(233)
received = []


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        answer = json.dumps({"number": len(received), "stop": received[-1]["loss"] < 0.02}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *words):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
thread = threading.Thread(target=server.serve_forever)
thread.start()
address = f"http://127.0.0.1:{server.server_port}/metrics"
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
model = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 1))
opt = torch.optim.Adam(model.parameters(), lr=0.05)
x = torch.rand(71, 2)
y = (3 * x[:, :1]).sin() * x[:, 1:]
for step in range(40):
    rows = torch.randperm(71)[:20]
    loss = nn.functional.mse_loss(model(x[rows]), y[rows])
    opt.zero_grad()
    loss.backward()
    opt.step()
    body = json.dumps({"step": step, "loss": loss.item()}).encode()
    with opener.open(urllib.request.Request(address, body, method="POST")) as response:
        answer = json.load(response)
    if answer["stop"]:
        print("told to stop at step", step)
        break
server.shutdown()
server.server_close()
thread.join()
print(len(received), [entry["step"] for entry in received] == list(range(len(received))), received[-1])
