# SPDX-License-Identifier: Apache-2.0
"""The communication of an optimizer step: who sends what to whom, the collectives, and their process groups.

One rank, the owner of a matrix, receives the whole matrix, orthogonalizes it, and sends back to each rank its part of
the result. Ranks exchange several matrices in one collective; together these are a bucket.

Names for parts of tensors, here and in ``layout``, ``math.momentum_storage`` and ``kernels.kernel_set``:

    Block      a matrix to orthogonalize, inside a parameter
    Rectangle  a rectangle of a matrix inside one tensor-parallel rank's parameter
    Piece      a rectangle of a matrix that one rank holds, by its place in the parameter and in the matrix
    Fragment   a contiguous part of a parameter, by its place in the parameter and in a flat tensor
    Rows       a piece of a matrix, by its place in a flat tensor only
    GridCopy   a copy of equally spaced rows to rows without gaps, or back
    ShardRun   a piece in this rank's shard, with its GridCopy between the flat tensor and a bucket's buffer
    Span       adjacent elements in two flat tensors: ShardRuns that one call updates, or a copy to host memory
    Tile       what one GPU program updates of a Span
    Batch      matrices of one shape in a bucket that this rank orthogonalizes together
"""
