# SPDX-License-Identifier: Apache-2.0
"""A cluster of Ray on this machine, until stdin ends: a head without CPUs, and three nodes with two each.

A process of its own, since Ray keeps workers for later: prints its number and the address of the cluster.
"""

import os
import sys

from ray.cluster_utils import Cluster

STORE_BYTES = 80 * 2**20

if os.fork():
    os._exit(0)

head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
cluster = Cluster(initialize_head=True, head_node_args=head)
for _ in range(3):
    cluster.add_node(wait=False, num_cpus=2, object_store_memory=STORE_BYTES)
cluster.wait_for_nodes()
print(os.getpid(), cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
