# SPDX-License-Identifier: Apache-2.0
"""Options by argparse with a file of defaults, results as CSV and JSON lines, a summary in columns; appended on each run."""
import argparse
import csv
import json
import logging
import pathlib
import sys
import tempfile

import torch
from torch import nn

pathlib.Path("defaults.json").write_text(json.dumps({"hidden": 14, "lr": 0.2, "loss": "huber"}))


def options(words=None):
    parser = argparse.ArgumentParser(fromfile_prefix_chars="@")
    parser.add_argument("--config", type=argparse.FileType("r"))
    parser.add_argument("--hidden", type=int, default=6)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--loss", choices=["mse", "huber"], default="mse")
    parser.add_argument("--activation", choices=["ReLU", "SiLU", "Mish"], default="SiLU")
    parser.add_argument("--no-bias", action="store_true")
    found = parser.parse_args(words)
    if found.config:
        with found.config:
            parser.set_defaults(**json.load(found.config))
        found = parser.parse_args([w for w in words if not w.startswith("--config")])
    return found


def run(opt, writer, lines):
    torch.manual_seed(239)
    model = nn.Sequential(
        nn.Linear(3, opt.hidden, bias=not opt.no_bias), getattr(nn, opt.activation)(), nn.Linear(opt.hidden, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=opt.lr)
    criterion = {"mse": nn.MSELoss, "huber": nn.HuberLoss}[opt.loss]()
    x = torch.rand(40, 3)
    y = x.prod(1, keepdim=True).sqrt()
    for epoch in range(2):
        for rows in torch.randperm(40).split(11):
            loss = criterion(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        writer.writerow([opt.activation, epoch, f"{loss.item():.12f}", sum(p.numel() for p in model.parameters())])
        lines.write(json.dumps({"options": vars(opt), "loss": loss.item()}, default=lambda f: f.name) + "\n")
        logging.info("%s %s %.10f", opt.activation, epoch, loss.item())
    return loss.item()


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(levelname).1s %(message)s")
    main = options()
    print(main, pathlib.Path(sys.argv[0]).suffix, len(sys.argv))
    kinds = [["--config=defaults.json"], ["--config=defaults.json", "--activation", "Mish", "--no-bias"], []]
    results = []
    for number, words in enumerate(kinds):
        with open("results.csv", "a", newline="") as f, open("results.jsonl", "a") as lines:
            writer = csv.writer(f, delimiter=";")
            if f.tell() == 0:
                writer.writerow(["activation", "epoch", "loss", "weights"])
            results.append((run(options(words), writer, lines), number))
    with open("results.csv", newline="") as f:
        rows = list(csv.DictReader(f, delimiter=";"))
    print(f"{'activation':>12} {'loss':>16}")
    for row in sorted(rows, key=lambda row: float(row["loss"])):
        print(f"{row['activation']:>12} {row['loss']:>16}")
    print("best", min(results))
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as f:
        f.writelines(open("results.jsonl"))
        f.seek(0)
        copy = pathlib.Path(folder, "copy")
        print(copy.write_text(f.read()) == pathlib.Path("results.jsonl").stat().st_size, len(rows))
    try:
        options(["--loss", "none"])
    except SystemExit as ended:
        print("refused with", ended.code)
