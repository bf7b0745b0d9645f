# SPDX-License-Identifier: Apache-2.0
"""Every collective on TensorFlow's tensors: the same kind comes back, and what cannot be sent is refused."""

from __future__ import annotations

import tensorflow as tf

import rankwise as rw
from rankwise.errors import ConfigurationError


def refused(value: object) -> str:
    """Return the error for what cannot be sent."""
    try:
        rw.all_reduce(value)
    except ConfigurationError as error:
        return str(error)
    raise AssertionError(f"{value} was sent")


with rw.join() as world:
    own = tf.range(4, dtype=tf.float64) + world.rank
    total = world.world_size * (world.world_size - 1) / 2
    tree = {"w": own, "layers": [own * 2, (tf.Variable(own), 1)]}
    reduced = rw.all_reduce(tree)
    assert all(tf.is_tensor(one) for one in (reduced["w"], reduced["layers"][0], reduced["layers"][1][0]))
    assert reduced["w"].dtype == tf.float64
    expected = [world.world_size * i + total for i in range(4)]
    assert reduced["w"].numpy().tolist() == reduced["layers"][1][0].numpy().tolist() == expected
    assert own.numpy().tolist() == [i + float(world.rank) for i in range(4)]

    dtypes = (tf.float16, tf.bfloat16, tf.float32, tf.uint8, tf.int8, tf.int32, tf.int64, tf.bool, tf.complex64)
    for dtype in dtypes:
        given = tf.cast(own, dtype)
        gathered = rw.all_gather(given)
        assert [part.dtype for part in gathered] == [dtype] * world.world_size
        assert (gathered[world.rank].numpy() == given.numpy()).all()

    last = world.world_size - 1
    assert rw.broadcast(own, source=last).numpy().tolist() == [i + float(last) for i in range(4)]
    assert rw.broadcast(tf.constant(2.5)).shape == ()
    assert rw.all_reduce(tf.zeros((0, 3))).shape == (0, 3)
    assert rw.reduce_scatter(own).numpy().tolist() == expected[world.rank * 2 : world.rank * 2 + 2]
    sent = rw.all_to_all([own[: to + 1] for to in range(world.world_size)])
    assert [part.numpy().tolist() for part in sent] == [
        [i + float(source) for i in range(world.rank + 1)] for source in range(world.world_size)
    ]
    # What starts in the middle of what was received: TensorFlow calculates with it as with any tensor.
    parts = rw.all_gather_uneven(own[: world.rank + 1])
    assert [float(tf.reduce_sum(part * part)) for part in parts] == [
        sum((i + source) ** 2 for i in range(source + 1)) for source in range(world.world_size)
    ]

    assert "tf.io.decode_raw" in refused(tf.constant("text"))
    assert "takes tensors, arrays and numbers, got SparseTensor" in refused(tf.sparse.from_dense([[1.0, 0.0]]))
    assert "takes tensors, arrays and numbers, got IndexedSlices" in refused(tf.IndexedSlices(own, tf.range(4)))
    assert "the result of tf.function, not inside" in tf.function(refused)(own).numpy().decode()
    assert rw.all_reduce(1) == world.world_size
    rw.print("every collective took TensorFlow's tensors")
