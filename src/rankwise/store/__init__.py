# SPDX-License-Identifier: Apache-2.0
"""The job's key-value store: how ranks tell each other small things outside the collectives.

A store with a secret is our own and lets in only who holds it; one without is torch's.
"""
