# SPDX-License-Identifier: Apache-2.0
"""Whether the replicas of a model are still replicas: checksums that travel with the gradients of ``replicate``."""
