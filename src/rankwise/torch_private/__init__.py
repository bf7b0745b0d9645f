# SPDX-License-Identifier: Apache-2.0
"""Every private name of torch that rankwise uses, behind functions named after their purpose.

``names`` lists them; one file per subject uses them. Imports nothing of rankwise; every other room may import it.
"""
