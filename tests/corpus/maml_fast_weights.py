# SPDX-License-Identifier: Apache-2.0
import torch
import torch.nn as nn
import torch.nn.functional as F


class Learner(nn.Module):
    """forward() takes weights; without any it uses its own."""

    def __init__(self, n_way):
        super().__init__()
        self.vars = nn.ParameterList()
        for shape in [(16, 4), (16,), (n_way, 16), (n_way,)]:
            p = nn.Parameter(torch.zeros(*shape))
            if len(shape) == 2:
                nn.init.kaiming_normal_(p)
            self.vars.append(p)

    def forward(self, x, vars=None):
        if vars is None:
            vars = self.vars
        x = F.relu(F.linear(x, vars[0], vars[1]))
        return F.linear(x, vars[2], vars[3])


class Meta(nn.Module):
    def __init__(self, n_way=3, update_lr=0.1, meta_lr=5e-3, update_step=2):
        super().__init__()
        self.update_lr, self.update_step = update_lr, update_step
        self.net = Learner(n_way)
        self.meta_optim = torch.optim.Adam(self.net.parameters(), lr=meta_lr)

    def forward(self, x_spt, y_spt, x_qry, y_qry):
        task_num, querysz = x_spt.size(0), x_qry.size(1)
        losses_q, corrects = 0, 0
        for i in range(task_num):
            fast_weights = list(self.net.parameters())
            for _ in range(self.update_step):
                loss = F.cross_entropy(self.net(x_spt[i], fast_weights), y_spt[i])
                grad = torch.autograd.grad(loss, fast_weights, create_graph=True)
                fast_weights = [p - self.update_lr * g for p, g in zip(fast_weights, grad)]
            logits_q = self.net(x_qry[i], fast_weights)
            losses_q = losses_q + F.cross_entropy(logits_q, y_qry[i])
            with torch.no_grad():
                corrects += torch.eq(F.softmax(logits_q, dim=1).argmax(dim=1), y_qry[i]).sum().item()
        loss_q = losses_q / task_num
        self.meta_optim.zero_grad()
        loss_q.backward()
        self.meta_optim.step()
        return loss_q.item(), corrects / (querysz * task_num)


def episode(tasks=3, n_way=3, k=3, q=5):
    centres = torch.randn(tasks, n_way, 1, 4) * 2
    y = torch.arange(n_way).view(1, n_way, 1).expand(tasks, n_way, k + q)
    x = centres + torch.randn(tasks, n_way, k + q, 4)
    flat = lambda a: a.reshape(tasks, -1, *a.shape[3:])  # noqa: E731
    return flat(x[:, :, :k]), flat(y[:, :, :k]), flat(x[:, :, k:]), flat(y[:, :, k:])


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(222)
    maml = Meta()
    for step in range(5):
        loss, acc = maml(*episode())
        print("step:", step, "\tloss:", loss, "\ttraining acc:", acc)
