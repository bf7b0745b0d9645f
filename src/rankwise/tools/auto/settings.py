"""Stub."""
from __future__ import annotations
from contextlib import contextmanager
import torch
Settings = tuple
def settings():
    return (torch.get_default_dtype(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.are_deterministic_algorithms_enabled())
@contextmanager
def restored(s):
    torch.set_default_dtype(s[0]); torch.use_deterministic_algorithms(s[3])
    with torch.autocast("cpu", enabled=s[1], dtype=s[2]):
        yield
