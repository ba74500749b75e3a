"""Small models with local functions: Constants in them, and attributes of every type."""

from tests.support.body_cases import W

ATTRIBUTES = {
    "float-Elu": ("<p: float = 0.5>", "y = Elu<alpha: float = @p>(x)", "p = 0.25"),
    "float-LeakyRelu": ("<p: float = 0.5>", "y = LeakyRelu<alpha: float = @p>(x)", "p = 0.25"),
    "float-Gemm": ("<p: float = 0.5>", "y = Gemm<alpha: float = @p, transB = 1>(x, x)", "p = 0.2"),
    "value_float": (
        "<p: float = 0.5>",
        "a = Constant<value_float: float = @p>() y = Mul(x, a)",
        "p = 0.2",
    ),
    "value_floats": (
        "<p: floats = [0.5, 2.0, 1.5]>",
        "a = Constant<value_floats: floats = @p>() y = Mul(x, a)",
        "p = [1.0, 2.0, 3.0]",
    ),
    "int-Softmax": ("<p: int = 0>", "y = Softmax<axis: int = @p>(x)", "p = 1"),
    "int-CumSum": (
        "<p: int = 1>",
        "a = Constant<value = int64 {1}>() t = CumSum<reverse: int = @p>(x, a) y = Sin(t)",
        "p = 0",
    ),
    "value_int": (
        "<p: int = 3>",
        "a = Constant<value_int: int = @p>() b = Cast<to = 1>(a) y = Mul(x, b)",
        "p = 5",
    ),
    "value_ints": (
        "<p: ints = [0]>",
        "a = Constant<value_ints: ints = @p>() t = ReduceSum<keepdims = 1>(x, a) y = Mul(x, t)",
        "p = [1]",
    ),
    "ints-Transpose": (
        "<p: ints = [0, 1]>",
        """w = Constant<value = float[3,3] {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9}>()
        t = Transpose<perm: ints = @p>(w) y = MatMul(x, t)""",
        "p = [1, 0]",
    ),
    "string-Einsum": (
        '<p: string = "ij,kj->ik">',
        "y = Einsum<equation: string = @p>(x, x)",
        'p = "ij,kj->ki"',
    ),
    "value_strings": (
        '<p: strings = ["a", "b"]>',
        "a = Constant<value_strings: strings = @p>() n = Size(a) b = Cast<to = 1>(n) y = Mul(x, b)",
        'p = ["a"]',
    ),
    "value": (
        "<p: tensor = float[3] {0.5, 2.0, 1.5}>",
        "a = Constant<value: tensor = @p>() y = Mul(x, a)",
        "p = float[3] {1.0, 2.0, 3.0}",
    ),
    "tensor-ConstantOfShape": (
        "<p: tensor = float[1] {0.5}>",
        "t = Shape(x) a = ConstantOfShape<value: tensor = @p>(t) y = Mul(x, a)",
        "p = float[1] {2.0}",
    ),
    "in-a-branch": (
        "<p: float = 0.5>",
        """t = Constant<value = bool {1}>() y = If(t) <then_branch = a () => (u) {
        v = LeakyRelu<alpha: float = @p>(x) u = Sin(v) }, else_branch = b () => (u) { u = Cos(x) }>""",
        "p = 0.25",
    ),
}

CALLS = {
    "default": "Y = my.f(X)",
    "passed": "Y = my.f<{passed}>(X)",
    "both": "t = my.f<{passed}>(X) u = my.f(X) v = my.f<{passed}>(u) Y = Concat<axis = 0>(t, u, v)",
    "nested-default": "Y = my.o(X)",
    "nested-passed": "Y = my.o<q{value}>(X)",
    "in-a-loop": """n = Constant<value = int64 {{2}}>() a, Y = Loop(n, , X) <body = b (int64 i,
        bool ci, float[A,B] x) => (bool ci, float[A,B] x2, float[C,D] y) {{
        x2 = Tanh(x) y = my.f(x) }}>""",
}

FUNCTIONS = {
    "Constant": """g (double[N,3] X) => (double[N,3] Y) { Y = my.f(X) }
        <domain: "my", opset_import: ["": 18]>
        f (x) => (y) { c = Constant<value = double[3] {1.0, 2.0, 3.0}>() y = Mul(x, c) }""",
    "Constant-of-two-calls": """g (double[N,3] X) => (double[N,3] Y) { a = my.f(X) Y = my.f(a) }
        <domain: "my", opset_import: ["": 18]>
        f (x) => (y) { c = Constant<value = double[3] {1.0, 2.0, 3.0}>() t = Mul(x, c) y = Sin(t) }""",
    "Constants-of-one-name": """g (double[N,3] X) => (double[N,3] Y) {
        c = Constant<value = double[3] {0.5, 0.4, 0.3}>() a = my.f(X) b = your.own.f(a)
        Y = Mul(b, c) }
        <domain: "my", opset_import: ["": 18]>
        f (x) => (y) { c = Constant<value = double[3] {1.0, 2.0, 3.0}>() y = Mul(x, c) }
        <domain: "your.own", opset_import: ["": 18]>
        f (x) => (y) { c = Constant<value = double[3] {3.0, 2.0, 1.0}>() y = Add(x, c) }""",
    "value_floats": """g (float[N,3] X) => (float[N,3] Y) { Y = my.f(X) }
        <domain: "my", opset_import: ["": 18]>
        f (x) => (y) { c = Constant<value_floats = [1.0, 2.0, 3.0]>() y = Mul(x, c) }""",
    "Constant-returned": """g (double[N,3] X) => (double[N,3] Y) { a, b = my.f(X) Y = Mul(a, b) }
        <domain: "my", opset_import: ["": 18]>
        f (x) => (y, c) { c = Constant<value = double[3] {1.0, 2.0, 3.0}>() y = Sin(x) }""",
    "Constant-in-nested-functions": """g (double[N,3] X) => (double[N,3] Y) { Y = my.o(X) }
        <domain: "my", opset_import: ["": 18, "my": 1]>
        o (x) => (y) { a = my.f(x) y = my.f(a) }
        <domain: "my", opset_import: ["": 18]>
        f (x) => (y) { c = Constant<value = double[3] {1.0, 2.0, 3.0}>() t = Mul(x, c) y = Sin(t) }""",
    "Constant-in-a-body-in-a-function": """g (double[N,3] X) => (double[N,3] Y) {
        a = my.f(X) Y = my.f(a) }
        <domain: "my", opset_import: ["": 18]>
        f (x) => (y) { n = Constant<value = int64 {2}>() y = Loop(n, , x) <body = b (int64 i,
        bool ci, z) => (ci, q) { c = Constant<value = double[3] {1.0, 2.0, 3.0}>() t = Mul(z, c)
        q = Sin(t) }> }""",
    "initializers-in-bodies-in-a-function": f"""g (double[N,3] X, bool c, bool e) => (double[N,3] Y) {{
        a = my.f(X, c) Y = my.f(a, e) }}
        <domain: "my", opset_import: ["": 18]>
        f (x, c) => (y) {{ n = Constant<value = int64 {{2}}>()
        p = If(c) <then_branch = t () => (double[3] w) <{W}> {{ }},
            else_branch = f () => (double[3] w) <double[3] w = {{1.0, 0.2, 0.3}}> {{ }}>
        y = Loop(n, , x) <body = b (int64 i, bool ci, z) => (ci, q) <{W}> {{
            t = Mul(z, w) u = Mul(t, p) q = Sin(u) }}> }}""",
    "function-called-in-a-body": """g (double[N,3] X, int64 n) => (double[N,3] Y) { a = my.f(X)
        Y = Loop(n, , a) <body = b (int64 i, bool ci, double[N,3] z) => (bool ci, double[N,3] q) {
            q = my.f(z) }> }
        <domain: "my", opset_import: ["": 18]>
        f (x) => (y) { c = Constant<value = double[3] {1.0, 2.0, 3.0}>() t = Mul(x, c) y = Sin(t) }""",
    "branches-as-attributes": """g (double[3] s) => (double[3] Y) {
        a = my.f<p = b1 () => (double[3] w) <double[3] w = {1.0, 2.0, 3.0}> { }>(s)
        b = my.f<p = b2 () => (double[3] u) <double[3] w = {3.0, 2.0, 1.0}> { u = Sin(w) }>(a)
        Y = Mul(a, b) }
        <domain: "my", opset_import: ["": 18]>
        f <p>(x) => (y) { c = Constant<value = bool {1}>()
        t = If(c) <then_branch: graph = @p, else_branch: graph = e () => (v) { v = Cos(x) }>
        u = If(c) <then_branch: graph = @p, else_branch: graph = e () => (v) { v = Sin(x) }>
        z = Mul(x, t) y = Add(z, u) }""",
    "optional-input-missing": """g (double[N,3] X, double[3] s) => (double[N,3] Y) {
        a = my.f(X) b = my.f(X, s) c = my.f(X, "") d = Add(a, b) Y = Mul(d, c) }
        <domain: "my", opset_import: ["": 18]>
        f (x, b) => (y) { w = Constant<value = double[3,3] {1, 2, 3, 4, 5, 6, 7, 8, 9}>()
        y = Gemm(x, w, b) }""",
    "output-unused": """g (double[N,3] X) => (double[N,3] Y) { a, "" = my.f(X) "", b = my.f(a)
        Y = Add(a, b) }
        <domain: "my", opset_import: ["": 18]>
        f (x) => (y, z) { c = Constant<value = double[3] {1.0, 2.0, 3.0}>() y = Mul(x, c)
        z = Sin(x) }""",
    "input-returned": """g (double[N,3] X) => (double[N,3] Y) { a, b = my.f(X) Y = Mul(a, b) }
        <domain: "my", opset_import: ["": 18]>
        f (x) => (y, z) { y = Sin(x) z = Identity(x) }""",
    "names-of-the-caller": """g (double[N,3] X) => (double[N,3] y) {
        c = Constant<value = double[3] {0.3, 0.2, 0.1}>() x = Mul(X, c) t = my.f(x) y = Sin(t) }
        <domain: "my", opset_import: ["": 18]>
        f (X) => (c) { t = Constant<value = double[3] {1.0, 2.0, 3.0}>() y = Mul(X, t)
        c = Sin(y) }""",
    "function-of-another-opset": """g (double[N,3] X, int64 n) => (double[N,3] Y) { a = my.f(X)
        Y = Loop(n, , a) <body = b (int64 i, bool ci, double[N,3] z) => (bool ci, double[N,3] q) {
            q = Mul(z, a) }> }
        <domain: "my", opset_import: ["": 17]>
        f (x) => (y) { c = Constant<value = double[3] {1.0, 2.0, 3.0}>() t = Mul(x, c) y = Sin(t) }""",
}
# whose operators have other versions there, and are converted
FUNCTIONS["function-of-an-older-opset"] = FUNCTIONS["function-of-another-opset"].replace("17", "13")
