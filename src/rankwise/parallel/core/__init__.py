# SPDX-License-Identifier: Apache-2.0
"""What strategies share: the registry of models, gradient buckets, hooks, checks of what ranks were given."""
