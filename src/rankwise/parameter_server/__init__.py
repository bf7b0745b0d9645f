# SPDX-License-Identifier: Apache-2.0
"""Parameter servers: some ranks keep the parameters and update them, the others compute gradients."""
