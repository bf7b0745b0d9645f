# SPDX-License-Identifier: Apache-2.0
SEED = 197
SAMPLES = 62
WIDTH = 11
BATCH = 12
RATE = 0.5
GAIN = 1.0
