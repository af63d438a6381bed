"""The numbers of types in GGUF files. The package gguf has them, too; importing it takes as long as a prompt."""

from __future__ import annotations

from enum import IntEnum


class TensorType(IntEnum):
    """Types of tensors; all except numbers are blocks."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41


BLOCKS = {
    TensorType.F32: (1, 4),
    TensorType.F16: (1, 2),
    TensorType.Q4_0: (32, 18),
    TensorType.Q4_1: (32, 20),
    TensorType.Q5_0: (32, 22),
    TensorType.Q5_1: (32, 24),
    TensorType.Q8_0: (32, 34),
    TensorType.Q8_1: (32, 40),
    TensorType.Q2_K: (256, 84),
    TensorType.Q3_K: (256, 110),
    TensorType.Q4_K: (256, 144),
    TensorType.Q5_K: (256, 176),
    TensorType.Q6_K: (256, 210),
    TensorType.Q8_K: (256, 292),
    TensorType.IQ2_XXS: (256, 66),
    TensorType.IQ2_XS: (256, 74),
    TensorType.IQ3_XXS: (256, 98),
    TensorType.IQ1_S: (256, 50),
    TensorType.IQ4_NL: (32, 18),
    TensorType.IQ3_S: (256, 110),
    TensorType.IQ2_S: (256, 82),
    TensorType.IQ4_XS: (256, 136),
    TensorType.I8: (1, 1),
    TensorType.I16: (1, 2),
    TensorType.I32: (1, 4),
    TensorType.I64: (1, 8),
    TensorType.F64: (1, 8),
    TensorType.IQ1_M: (256, 56),
    TensorType.BF16: (1, 2),
    TensorType.TQ1_0: (256, 54),
    TensorType.TQ2_0: (256, 66),
    TensorType.MXFP4: (32, 17),
    TensorType.NVFP4: (64, 36),
    TensorType.Q1_0: (128, 18),
}
"""Numbers and bytes of a block."""


class ValueType(IntEnum):
    """Types of values in the metadata."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Types of tokens."""
