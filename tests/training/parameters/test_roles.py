"""Roles of constants in models written by hand, and what trainers say of them."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxgrad import add_loss_output, onnx_derivative, trainable
from onnxgrad.compat import (
    OrtGradientForwardBackward,
    OrtGradientForwardBackwardOptimizer,
    OrtGradientOptimizer,
)
from onnxgrad.graph import get_train_initializer
from tests.support.errors import naming
from tests.support.models import initializer_arrays, parse_model
from tests.support.small_models import float32_model

RNG = np.random.default_rng(0)
INF = np.inf


def role_case(text: str, **arrays) -> Callable[[], onnx.ModelProto]:
    """Return a function that returns a model; arrays of a shape are drawn, floats are float32."""

    def make() -> onnx.ModelProto:
        values = {n: drawn_normal(*a) if isinstance(a, tuple) else a for n, a in arrays.items()}
        return float32_model(f"g {text}", **values)

    return make


def drawn_normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def names_that_train(proto) -> set[str]:
    return {t.name for t in trainable(proto) if t.trains}


TURNS = np.outer(np.arange(4), 0.5 ** np.arange(1, 6))  # angles of positions, below 90 degrees
CAUSAL = np.where(np.tri(4) > 0, 0.0, -INF).astype(np.float32)
ATTENTION = """(float[N, 4, 3] X) => (float[N, 4, 3] Y) {
    Q = MatMul(X, W)  K = Transpose<perm=[0, 2, 1]>(Q)
    S = MatMul(Q, K)  Z = Mul(S, scale)  M = Add(Z, mask)
    P = Softmax<axis=-1>(M)  Y = MatMul(P, Q) }"""

CASES = {
    "scale and bias behind a GroupNormalization": (
        role_case("""(float[N, 3, 5] X) => (float[N, 4, 5] Y) {
            C = Conv(X, W) G = GroupNormalization<num_groups=2>(C, val_1, val_2)
            S = Mul(G, factor) Y = Add(S, term) }""",
              W=(4, 3, 1), val_1=np.ones(2), val_2=np.zeros(2), factor=(4, 1), term=(4, 1)),
        {"W", "factor", "term"}),
    "scale and bias of rows divided by a bounded norm": (
        role_case("""(float[N, 3] X) => (float[N, 4] Y) {
            Z = MatMul(X, W) L = ReduceL2(Z, last) B = Min(L, most) U = Div(Z, B)
            S = Mul(U, factor) Y = Add(S, term) }""",
              W=(3, 4), last=np.array([1]), most=np.array(9.0), factor=(4,), term=(4,)),
        {"W", "factor", "term"}),
    "mask of -inf": (
        role_case(ATTENTION, W=(3, 3), scale=[0.57735026], mask=CAUSAL), {"W"}),
    "mask of huge numbers": (
        role_case(ATTENTION, W=(3, 3), scale=0.57735026, mask=(np.tri(4) - 1) * 1e9), {"W"}),
    "mask of 0 and -100": (
        role_case(ATTENTION, W=(3, 3), scale=0.5, mask=(np.tri(4) - 1) * 100), {"W"}),
    "learned bias of scores": (
        role_case(ATTENTION, W=(3, 3), scale=0.57735026, mask=(4, 4)), {"W", "mask"}),
    "learned bias by distance, where nothing is masked": (
        role_case("""(float[N, T, 3] X, bool[N, 1, T] seen) => (float[N, T, 3] Y) {
            K = MatMul(X, W) R = Transpose<perm=[0, 2, 1]>(X) S = MatMul(K, R) n = Shape(S)
            t = Gather(n, two) r = Range(zero, t, one) c = Unsqueeze(r, two) u = Unsqueeze(r, none)
            d = Sub(c, u) e = Abs(d) B = Gather(bias, e) M = Where(seen, B, low) A = Add(S, M)
            P = Softmax(A) Y = MatMul(P, X) }""",
              W=(3, 3), bias=(9,), low=-1e9, zero=np.array(0), one=np.array(1),
              two=np.array(1), none=np.array([0])), {"W", "bias"}),
    "factor on the left": (
        role_case("(float[3, N] X) => (float[2, N] Y) { Z = MatMul(W, X) Y = Add(Z, b) }",
              W=(2, 3), b=(2, 1)), {"W", "b"}),
    "a number that is expanded to a bias": (
        role_case("""(float[N, 3, 4, 4] X) => (float[N, 2, 2, 2] Y) {
            one = Shape<end=1>(W)  b = Expand(zero, one)  Y = Conv(X, W, b) }""",
              W=(2, 3, 3, 3), zero=0.0), {"W"}),
    "expected class of a detector": (
        role_case("""(float[N, 3, 5] X) => (float[N, 4, 5] Y) {
            Z = Conv(X, W) R = Reshape(Z, shape) T = Transpose<perm=[0, 2, 1, 3]>(R)
            P = Softmax<axis=1>(T) D = Conv(P, ramp) E = Reshape(D, last) Y = Sub(anchors, E) }""",
              W=(64, 3, 1), shape=np.array([0, 4, 16, 5]), last=np.array([0, 4, 5]),
              ramp=np.arange(16.0).reshape(1, 16, 1, 1), anchors=(1, 4, 5)), {"W"}),
    "expected number by equal steps": (
        role_case("""(float[N, 3] X) => (float[N, 1] Y) {
            Z = MatMul(X, W) P = Softmax(Z) Y = MatMul(P, bins) }""",
              W=(3, 5), bins=np.linspace(0, 1, 5)[:, None]), {"W"}),
    "expected number by a product and a sum": (
        role_case("""(float[N, 3] X) => (float[N] Y) {
            Z = MatMul(X, W) P = Softmax(Z) Q = Mul(P, bins)
            Y = ReduceSum<keepdims=0>(Q, axis) }""",
              W=(3, 5), bins=np.arange(5.0), axis=np.array([1])), {"W"}),
    "a last layer behind a Softmax": (
        role_case("""(float[N, 3] X) => (float[N, 1] Y) {
            Z = MatMul(X, W) P = Softmax(Z) Y = MatMul(P, V) }""",
              W=(3, 5), V=(5, 1)), {"W", "V"}),
    "integers that are cast and scaled": (
        role_case("""(float[N, 3] X) => (float[N, 4] Y) {
            F = Cast<to=1>(Q) C = Sub(F, zero) W = Mul(C, scale) Z = MatMul(X, W)
            Y = Add(Z, b) }""",
              Q=RNG.integers(-9, 9, (3, 4)).astype(np.int8), zero=(4,), scale=(4,),
              b=(4,)), {"b"}),
    "integers in blocks, each with a scale": (
        role_case("""(float[N, 8] X) => (float[N, 4] Y) {
            F = Cast<to=1>(Q) E = Unsqueeze(scale, last) B = Mul(F, E) R = Reshape(B, shape)
            W = Transpose(R) Z = MatMul(X, W) Y = Mul(Z, gain) }""",
              Q=RNG.integers(0, 9, (4, 2, 4)).astype(np.uint8), scale=(4, 2),
              last=np.array([2]), shape=np.array([4, 8]), gain=(4,)), set()),
    "integers that are bounded": (
        role_case("""(float[N, 3] X) => (float[N, 4] Y) {
            F = Cast<to=1>(Q) B = Max(F, low) W = Mul(B, scale) Z = MatMul(X, W) Y = Add(Z, b) }""",
              Q=RNG.integers(-9, 9, (3, 4)).astype(np.int8), low=np.array(-8.0), scale=(4,),
              b=(4,)), {"b"}),
    "integers that are scaled behind the product": (
        role_case("""(float[N, 3] X) => (float[N, 4] Y) {
            W = Cast<to=1>(Q) Z = MatMul(X, W) S = Mul(Z, scale) B = Add(S, b) R = Relu(B)
            Y = MatMul(R, V) }""",
              Q=RNG.integers(-9, 9, (3, 4)).astype(np.int8), scale=(4,), b=(4,),
              V=(4, 4)), {"b", "V"}),
    "packed integers": (
        role_case("""(float[N, 4] X) => (float[N, 4] Y) {
            A = BitwiseAnd(Q, fifteen) H = BitShift<direction="RIGHT">(Q, four)
            P = Concat<axis=0>(A, H)
            F = Cast<to=1>(P) C = Sub(F, zero) W = Mul(C, scale) Y = MatMul(X, W) }""",
              Q=RNG.integers(0, 255, (2, 4)).astype(np.uint32), fifteen=np.uint32([15]),
              four=np.uint32([4]), zero=(4,), scale=(4,)), set()),
    "rows of integers that are gathered": (
        role_case("""(int64[N, 2] I) => (float[N, 2, 4] Y) {
            G = Gather(Q, I) F = Cast<to=1>(G) S = Gather(scales, I) E = Mul(F, S) T = Mul(E, one)
            P = Add(T, positions) Y = MatMul(P, W) }""",
              Q=RNG.integers(-9, 9, (5, 4)).astype(np.int8), scales=(5, 1), one=np.array(0.5),
              positions=(2, 4), W=(4, 4)), {"positions", "W"}),
    "a weight with a mask of bytes": (
        role_case("""(float[N, 3] X) => (float[N, 4] Y) {
            M = Cast<to=1>(mask) V = Mul(W, M) Y = MatMul(X, V) }""",
              mask=np.tri(3, 4).astype(np.uint8), W=(3, 4)), {"W"}),
    "a weight with a mask of signs": (
        role_case("""(float[N, 3] X) => (float[N, 4] Y) {
            M = Cast<to=1>(signs) V = Mul(W, M) Y = MatMul(X, V) }""",
              signs=np.tri(3, 4).astype(np.int8) - np.int8(1), W=(3, 4)), {"W"}),
    "integers of a bias": (
        role_case("""(float[N, 3] X) => (float[N, 4] Y) {
            F = Cast<to=1>(Q) b = Mul(F, scale) Y = Gemm(X, W, b) }""",
              Q=np.array([900, -400, 70, 8], np.int32), scale=(4,), W=(3, 4)), {"W"}),
    "slopes of positions": (
        role_case("""(float[N, 3] X) => (float[N, 4] Y) {
            F = Cast<to=1>(positions) b = Mul(F, slopes) Y = Gemm(X, W, b) }""",
              positions=np.arange(4, dtype=np.int32), slopes=(4,), W=(3, 4)), {"W", "slopes"}),
    "rounded data": (
        role_case("""(float[N, 3] X) => (float[N, 4] Y) {
            Z = MatMul(X, W) D = Div(Z, act_scale) A = Add(D, zero) R = Round(A)
            C = Clip(R, low, high)
            B = Sub(C, zero) S = Mul(B, act_scale) Y = MatMul(S, V) }""",
              W=(3, 4), act_scale=(4,), zero=0.0, low=0.0, high=255.0, V=(4, 4)), {"W", "V"}),
    "Gemm, transposed": (
        role_case("(float[N, 3] X) => (float[N, 2] Y) { Y = Gemm<transB=1>(X, W, b) }",
              W=(2, 3), b=(2,)), {"W", "b"}),
    "weight moved and cast": (
        role_case("""(float[N, 3] X) => (float[N, 2] Y) {
            A = Transpose(W) B = Identity(A) C = CastLike(B, X) Z = MatMul(X, C)
            c = Reshape(b, shape) Y = Add(c, Z) }""",
            W=(2, 3), b=(2, 1), shape=np.array([1, 2])), {"W", "b"}),
    "bias behind Reshape": (
        role_case("""(float[N, 3] X) => (float[N, 2, 2] Y) {
            Z = MatMul(X, W) R = Reshape(Z, shape) Y = Add(R, b) }""",
            W=(3, 4), b=(2,), shape=np.array([-1, 2, 2])), {"W", "b"}),
    "bias of one feature": (
        role_case("(float[N, 3] X) => (float[N, 1] Y) { Z = MatMul(X, W) Y = Add(Z, b) }",
              W=(3, 1), b=[0.5]), {"W", "b"}),
    "bias behind two products": (
        role_case("""(float[N, 3] X) => (float[N, 2] Y) {
            A = MatMul(X, W) B = MatMul(X, V) C = Add(A, B) Y = Add(b, C) }""",
            W=(3, 2), V=(3, 2), b=(2,)), {"W", "V", "b"}),
    "constants in nodes": (
        role_case("""(float[N, 2] X) => (float[N, 2] Y) {
            W = Constant<value = float[2, 2] {1, 2, 3, 4}>() Z = MatMul(X, W)
            b = Constant<value_floats = [1.0, 2.0]>() A = Add(Z, b)
            two = Constant<value_float = 2.0>() Y = Mul(A, two) }"""), {"W", "b"}),
    "scaling of inputs and targets": (
        role_case("""(float[N, 2] X) => (float[N, 2] Y) {
            A = Sub(X, mean) B = Div(A, std) C = MatMul(B, W) D = Add(C, b)
            E = Mul(D, unit) Y = Add(E, offset) }""",
            W=(2, 2), b=(2,), mean=(2,), std=[2.0, 3.0], unit=[5.0, 7.0],
            offset=[10.0, 20.0]), {"W", "b"}),
    "layer norm in single steps, at the very end": (
        role_case("""(float[N, 3] X) => (float[N, 3] Y) {
            H = MatMul(X, W) m = ReduceMean<keepdims=1>(H, axis) d = Sub(H, m) p = Pow(d, two)
            v = ReduceMean<keepdims=1>(p, axis) e = Add(v, eps) r = Sqrt(e) n = Div(d, r)
            s = Mul(n, g) Y = Add(s, b) }""",
            W=(3, 3), g=(3,), b=(3,), two=2.0, eps=1e-5, axis=np.array([-1])), {"W", "g", "b"}),
    "bounds and exponents": (
        role_case("""(float[N, 3] X) => (float[N, 3] Y) {
            A = MatMul(X, W) B = Clip(A, low, high) C = Max(B, floor) Y = Pow(C, power) }""",
            W=(3, 3), low=-1.0, high=1.0, floor=[0.0, 0.1, 0.2], power=[1.0, 2.0, 3.0]), {"W"}),
    "running statistics": (
        role_case("""(float[N, 2, 4] X) => (float[N, 2, 4] Y) {
            Y = BatchNormalization(X, s, b, m, v) }""",
              s=(2,), b=(2,), m=(2,), v=[1.0, 2.0]), {"s", "b"}),
    "slope of one number": (
        role_case("(float[N, 2] X) => (float[N, 2] Y) { A = MatMul(X, W) Y = PRelu(A, slope) }",
              W=(2, 2), slope=[0.25]), {"W", "slope"}),
    "einsum": (
        role_case("""(float[N, 2] X) => (float[N, 3] Y) {
            Y = Einsum<equation="ni,ij->nj">(X, W) }""",
              W=(2, 3)), {"W"}),
    "factors of rotations of few positions, and learned ones": (
        role_case("""(float[N, 4, 5] X) => (float[N, 4, 5] Y) {
            Z = MatMul(X, W) A = Mul(Z, cosines) B = Mul(Z, sines) C = Mul(Z, halves)
            D = Mul(Z, large) E = Sum(A, B, C, D) Y = MatMul(E, V) }""",
              W=(5, 5), V=(5, 5), cosines=np.cos(TURNS), sines=np.sin(TURNS),
              halves=np.cos(TURNS) / 2, large=1 / np.cos(TURNS / 3)),
        {"W", "V", "halves", "large"}),
    "embedding, its positions, a wave": (
        role_case("""(int64[N, T] I) => (float[N, T, 2] Y) {
            A = Gather(table, I) s = Shape(I) t = Gather(s, one) r = Range(zero, t, one)
            p = Gather(positions, r) B = Add(A, p) q = Gather(wave, r) C = Add(B, q)
            Y = MatMul(C, W) }""",
            table=(5, 2), positions=(9, 2), W=(2, 2),
            wave=np.stack([np.sin(np.arange(9)), np.cos(np.arange(9))], 1).astype(np.float32),
            one=np.array(1), zero=np.array(0)), {"table", "positions", "W"}),
    "class token": (
        role_case("""(float[N, 3, 2] X) => (float[N, 4, 2] Y) {
            A = MatMul(X, W) s = Shape<start=0, end=1>(X) n = Concat<axis=0>(s, rest)
            t = Expand(token, n) C = Concat<axis=1>(t, A) Y = MatMul(C, V) }""",
            W=(2, 2), V=(2, 2), token=(1, 1, 2), rest=np.array([1, 2])), {"W", "V", "token"}),
    "If": (
        role_case("""(bool c, float[N, 2] X) => (float[N, 2] Y) {
            Y = If(c) <
                then_branch = yes () => (float[N, 2] a) {
                    W = Constant<value = float[2, 2] {1, 2, 3, 4}>() a = MatMul(X, W) },
                else_branch = no () => (float[N, 2] b) { z = MatMul(X, V) b = Add(z, d) }> }""",
            V=(2, 2), d=(2,)), {"W", "V", "d"}),
    "Loop": (
        role_case("""(int64 n, float[N, 2] X) => (float[N, 2] Y) {
            Y = Loop(n, , X) <body = body (int64 i, bool c, float[N, 2] h)
                => (bool d, float[N, 2] k) {
                d = Identity(c) a = MatMul(h, W) b = Add(a, bias) k = Clip(b, low, high) }> }""",
            W=(2, 2), bias=(2,), low=-1.0, high=1.0), {"W", "bias"}),
    "Scan with weights as states": (
        role_case("""(float[T, 2] X) => (float[T, 2] Y) {
            last, end, Y = Scan<num_scan_inputs=1,
                body = body (float[2, 2] w, float[2] h, float[2] x)
                    => (float[2, 2] v, float[2] g, float[2] y) {
                v = Identity(w) z = MatMul(h, w) s = Add(z, x) g = Tanh(s) y = Identity(g) }>
                (W, h0, X) }""",
            W=(2, 2), h0=(2,)), {"W", "h0"}),
    "zero states": (
        role_case("""(float[T, N, 2] X) => (float[T, 1, N, 3] Y) {
            Y = LSTM<hidden_size=3>(X, W, R, B, , h0, c0) }""",
            W=(1, 12, 2), R=(1, 12, 3), B=(1, 24), h0=np.zeros((1, 1, 3), "f"),
            c0=np.zeros((1, 1, 3), "f")), {"W", "R", "B"}),
    "function": (
        role_case("""(float[N, 2] X) => (float[N, 2] Y) { Y = local.layer(X, W, b) }
            <domain: "local", opset_import: ["": 18]>
            layer (x, w, b) => (y) { t = Transpose(w) z = MatMul(x, t) y = Add(z, b) }""",
            W=(2, 2), b=(2,)), {"W", "b"}),
    "fused": (
        role_case("""(float[N, 2] X) => (float[N, 2] Y) {
            A = com.microsoft.FusedMatMul<transB=1>(X, W) G = com.microsoft.BiasGelu(A, b)
            Y, m, i, s = com.microsoft.SkipLayerNormalization(G, X, g, o, c) }""",
            W=(2, 2), b=(2,), g=(2,), o=(2,), c=(2,)), {"W", "b", "g", "o", "c"}),
    "scales of Resize, ends of Range": (
        role_case("""(float[N, 1, 4] X) => (float[N, 1, L] Y) {
            A = Conv(X, W) B = Resize<mode="nearest">(A, , scales) r = Range(zero, end, step)
            Y = Add(B, r) }""",
            W=(1, 1, 1), scales=[1.0, 1.0, 2.0], zero=0.0, end=8.0, step=1.0), {"W"}),
    "mask of a weight": (
        role_case("""(float[N, 3] X) => (float[N, 3] Y) { V = Mul(W, kept) Y = MatMul(X, V) }""",
              W=(3, 3), kept=np.tri(3, dtype=np.float32)), {"W"}),
    "low rank": (
        role_case("""(float[N, 3] X) => (float[N, 3] Y) {
            L = MatMul(A, B) S = Mul(L, half) V = Add(W, S) Y = MatMul(X, V) }""",
              W=(3, 3), A=(3, 1), B=(1, 3), half=0.5), {"W", "A", "B"}),
    "fixed filter": (
        role_case("""(float[N, 2, 5] X) => (float[N, 2, 3] Y) {
            A = Conv(X, W) Y = Conv<group=2>(A, blur) }""",
              W=(2, 2, 1), blur=[[[0.25, 0.5, 0.25]]] * 2), {"W"}),
    "nothing but a factor and a bias": (
        role_case("(float[N, 2] X) => (float[N, 2] Y) { Z = Mul(X, w) Y = Add(Z, b) }",
              w=(2,), b=(2,)), {"w", "b"}),
    "toy numbers": (
        role_case("""(float[N, 6] X, int64[N] I) => (float[N, 3] Y) {
            A = MatMul(X, W) B = Gather(table, I) C = Add(A, B) Y = Add(C, b) }""",
              W=np.arange(18.0).reshape(6, 3), table=np.arange(21.0).reshape(7, 3), b=np.ones(3)),
        {"W", "table", "b"}),
    "filters of ones": (
        role_case("(float[N, 2, 5] X) => (float[N, 2, 3] Y) { Y = Conv<group=2>(X, W) }",
              W=np.ones((2, 1, 3))), {"W"}),
    "a line": (
        role_case("(float[N, 1] X) => (float[N, 1] Y) { Z = Mul(X, a) Y = Add(Z, b) }",
              a=[1.0], b=[0.0]), {"a", "b"}),
    "factors named as weights behind the last product": (
        role_case("(float[N, 2] X) => (float[N, 2] Y) { Z = MatMul(X, W) Y = Mul(Z, gamma) }",
              W=(2, 2), gamma=[1e-5, 2e-5]), {"W", "gamma"}),
    "factors of another name there": (
        role_case("(float[N, 2] X) => (float[N, 2] Y) { Z = MatMul(X, W) Y = Mul(Z, y_std) }",
              W=(2, 2), y_std=[3.0, 7.0]), {"W"}),
    "not a number": (
        role_case("(float[N, 2] X) => (float[N, 2] Y) { Z = MatMul(X, V) Y = MatMul(Z, W) }",
              V=(2, 2), W=[[1.0, INF], [0.0, 1.0]]), {"V"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_roles(name):
    make, expected = CASES[name]
    proto = make()
    rows = trainable(proto)
    assert names_that_train(proto) == expected, rows
    assert all(t.why for t in rows)


def test_scale_behind_an_rms_normalization_trains():
    proto = parse_model(
        """g (float[N, 3] X) => (float[N, 4] Y) {
            Z = MatMul(X, W) U = RMSNormalization(Z, val_1) Y = Mul(U, factor) }""",
        opset=23, W=drawn_normal(3, 4), val_1=np.ones(4, np.float32), factor=drawn_normal(4),
    )  # fmt: skip
    assert names_that_train(proto) == {"W", "factor"}


def test_rows_and_table():
    proto = CASES["constants in nodes"][0]()
    rows = trainable(proto)
    first = rows[0]
    assert (first.name, first.shape, first.dtype, first.size, first.trains) == (
        "W", (2, 2), "float32", 4, True,
    )  # fmt: skip
    assert first.why == "factor of MatMul"
    lines = str(rows).splitlines()
    assert lines[0].split() == ["name", "shape", "dtype", "trains", "why"]
    assert len(lines) == len(rows) + 2
    assert lines[-1] == "2 of 3 float constants train: 6 of 7 numbers"
    assert repr(rows) == str(rows)


def test_names_with_control_characters_are_escaped():
    proto = float32_model("agraph (float[N, 1] X) => (float[N, 1] Y) { Y = MatMul(X, W) }")
    name = "a\x1b[2Jb\nc"
    proto.graph.initializer.append(numpy_helper.from_array(drawn_normal(1, 1), name))
    proto.graph.node[0].input[1] = proto.graph.node[0].name = name
    text = str(trainable(proto))
    assert "\x1b" not in text
    assert len(text.splitlines()) == 3
    assert trainable(proto)[0].name == name


TEMPERATURE = role_case(
    """(float[N, 3] X) => (float[N, 2] Y) {
        Z = MatMul(X, W) s = Exp(logit_scale) Y = Mul(Z, s) }""",
    W=(3, 2), logit_scale=np.float32(0.3).reshape(()),
)  # fmt: skip
X, Y = drawn_normal(20, 3), drawn_normal(20, 2)


def fit_with_inner_loss(proto, **options):
    full = add_loss_output(proto, "l2")
    return OrtGradientOptimizer(full, max_iter=1, random_state=0, **options).fit(X, Y)


def test_learned_scalar_is_trained_and_named():
    with pytest.warns(UserWarning, match="'logit_scale' trains") as caught:
        state = fit_with_inner_loss(TEMPERATURE()).get_state()
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert set(state) == {"W", "logit_scale"}
    assert state["logit_scale"] != np.float32(0.3)


@pytest.mark.filterwarnings("error")
def test_users_choice_wins_in_silence():
    assert set(fit_with_inner_loss(TEMPERATURE(), weights_to_train=["W"]).get_state()) == {"W"}
    proto = CASES["scaling of inputs and targets"][0]()
    full = add_loss_output(proto, "l2")
    trainer = OrtGradientOptimizer(full, ["mean"], max_iter=1, random_state=0)
    trainer.fit(X[:, :2], Y)
    assert (trainer.get_state()["mean"] != initializer_arrays(proto)["mean"]).all()


@pytest.mark.filterwarnings("error")
def test_the_rest_stays_and_is_logged(caplog):
    make, expected = CASES["scaling of inputs and targets"]
    proto = make()
    caplog.set_level(logging.INFO, "onnxgrad")
    trainer = OrtGradientForwardBackwardOptimizer(proto, max_iter=2, random_state=0)
    trainer.fit(X[:, :2], Y)
    assert set(trainer.get_state()) == expected
    [said] = [r.getMessage() for r in caplog.records if "not trained" in r.getMessage()]
    assert all(f"'{name}' (" in said for name in ("mean", "std", "unit", "offset"))
    passes = OrtGradientForwardBackward(proto)
    assert set(passes.weights_to_train) == expected


def test_nothing_to_train_is_an_error():
    proto = float32_model(
        "agraph (float[N, 2] X) => (float[N, 2] Y) { A = Clip(X, low, high) Y = Pow(A, power) }",
        low=0.1, high=5.0, power=[1.0, 2.0],
    )  # fmt: skip
    full = add_loss_output(proto, "l2")
    with pytest.raises(ValueError, match=naming("'power'", "exponent", "Pow")):
        OrtGradientOptimizer(full, max_iter=1).fit(X[:, :2], Y)
    assert set(OrtGradientOptimizer(full, ["power"], max_iter=1).fit(X[:, :2], Y).get_state())
    assert OrtGradientForwardBackward(proto).weights_to_train == []


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_weights_that_start_equal_are_no_filter_bank(value):
    """A linear model of many features that was never trained."""
    W = np.full((2000, 3), value, np.float32)
    proto = float32_model("agraph (float[N, 2000] X) => (float[N, 3] Y) { Y = MatMul(X, W) }", W=W)
    assert names_that_train(proto) == {"W"}


SLOPES = """agraph (float[N, 4, 4, 3] X, float[N, 1, 1, 4] places) => (float[N, 4, 4, 3] Y) {{
    Q = MatMul(X, W)  K = Transpose<perm=[0, 1, 3, 2]>(Q)  S = MatMul(Q, K)
    B = Mul({name}, places)  M = Add(S, B)  P = Softmax<axis=-1>(M)  Y = MatMul(P, Q) }}"""


@pytest.mark.parametrize("heads", [2, 4, 6, 12])
@pytest.mark.parametrize(("name", "doubtful"), [("slopes", True), ("val_7", False)])
def test_slopes_of_alibi_stay_and_are_named(name, doubtful, heads):
    """A warning names them, unless an exporter has generated their name."""

    def published_slopes(n: int) -> list[float]:
        if n & (n - 1) == 0:
            return [2 ** (-8 * i / n) for i in range(1, n + 1)]
        before = 1 << n.bit_length() - 1
        return published_slopes(before) + published_slopes(2 * before)[::2][: n - before]

    slopes = np.reshape(published_slopes(heads), (heads, 1, 1))
    proto = float32_model(
        SLOPES.format(name=name).replace("4, 4, 3]", f"{heads}, 4, 3]"),
        W=drawn_normal(3, 3), **{name: slopes},
    )  # fmt: skip
    rows = {t.name: t for t in trainable(proto)}
    assert {n: (t.trains, t.doubtful) for n, t in rows.items()} == {
        "W": (True, False),
        name: (False, doubtful),
    }


def test_zeros_that_transformers_adds_to_logits_stay():
    text = """agraph (float[N, 3] X) => (float[N, 4] Y) {
        Z = MatMul(X, W)  Y = Add(Z, final_logits_bias) }"""
    proto = float32_model(text, W=drawn_normal(3, 4), final_logits_bias=np.zeros((1, 4)))
    assert names_that_train(proto) == {"W"}


def test_factors_of_a_loss_stay():
    proto = float32_model(
        "agraph (float[N, 3] X) => (float[N, 2] Y) { Y = MatMul(X, W) }", W=drawn_normal(3, 2)
    )
    for loss, options in (("huber", {"delta": 0.5}), ("elastic", {}), ("poisson", {})):
        full = add_loss_output(proto, loss, penalty={"W": 0.1}, **options)
        assert names_that_train(full) == {"W"}


def test_sizes_are_no_default_weights_of_derivatives():
    proto = float32_model(
        """agraph (float[N, 1, 4] X) => (float[N, 1, L] Y) {
            A = Conv(X, W) s = Shape(A) f = Cast<to=1>(s) g = Mul(f, factors) h = Floor(g)
            sizes = Cast<to=7>(h) B = Resize<mode="nearest">(A, , , sizes)
            e = Cast<to=7>(end) n = Cast<to=7>(zero) o = Cast<to=7>(step)
            i = Range(n, e, o) r = Cast<to=1>(i) Y = Add(B, r) }""",
        W=drawn_normal(1, 1, 1), factors=[1.0, 1.0, 2.0], zero=0.0, end=8.0, step=1.0,
    )  # fmt: skip
    assert set(get_train_initializer(proto)) == {"W"}
    outputs = [y.name for y in onnx_derivative(proto).graph.output]
    assert outputs == ["X_grad", "W_grad"]


def test_an_input_that_is_used_otherwise_too_keeps_its_gradient():
    proto = float32_model(
        """agraph (float[N] X) => (float[N] Y) {
            c = Cast<to=7>(X) z = Reshape(X, c) Y = Mul(X, X) }"""
    )
    proto.graph.output.add().CopyFrom(proto.graph.output[0])
    del proto.graph.output[1:]
    assert [y.name for y in onnx_derivative(proto).graph.output] == ["X_grad"]


def test_zeros_that_an_exporter_wrote_as_a_constant():
    """`torch.zeros_like(x)` of a static shape; parameters never get the name of a Constant."""
    text = """agraph (float[2, 3] X) => (float[2, 3] Y) {
        h = MatMul(X, W)
        z = Add("/Constant_7_output_0", h)
        Y = MatMul(z, W2)
    }"""
    arrays = {
        "W": drawn_normal(3, 3),
        "W2": drawn_normal(3, 3),
        "/Constant_7_output_0": np.zeros((2, 3)),
    }
    proto = float32_model(text, **arrays)
    proto.producer_name = "pytorch"
    assert names_that_train(proto) == {"W", "W2"}


def test_a_factor_of_numbers_in_int64_is_no_scale():
    """Only integers of few bits, or such as nodes unpack, are weights that a scale belongs to."""
    rng = np.random.default_rng(0)
    model = parse_model(
        """g (float[N,3] x) => (float[N,4] y) {
            k = Cast<to=1>(counts)  m = Mul(k, w)  y = MatMul(x, m) }""",
        counts=rng.integers(2, 9, (3, 4)),
        w=rng.normal(size=(3, 4)).astype(np.float32),
    )
    assert [weight.name for weight in trainable(model).trained] == ["w"]
