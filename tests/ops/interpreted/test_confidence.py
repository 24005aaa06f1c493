"""The confidence kernel under Triton's interpreter, on the CPU: the contract."""

from __future__ import annotations

from tests.ops.confidence_contract import ConfidenceContract


class TestTriton(ConfidenceContract):
    implementation = "triton"
