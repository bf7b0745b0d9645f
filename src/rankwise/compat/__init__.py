# SPDX-License-Identifier: Apache-2.0
"""Other libraries' words for rankwise's calls: a script that was written for one of them changes one line."""
