# SPDX-License-Identifier: Apache-2.0
"""Random numbers along the batch, drawn so that N ranks have what one rank would have drawn for all samples."""
