# SPDX-License-Identifier: Apache-2.0
"""The job's key-value store: how ranks exchange small values outside the collectives.

A store with a secret is rankwise's own and accepts only processes that hold it; one without is torch's.
"""
