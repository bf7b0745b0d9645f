# SPDX-License-Identifier: Apache-2.0
"""How ranks communicate: opening and closing a world, backends, collectives, values from rank to rank."""
