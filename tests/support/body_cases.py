"""Small models whose graphs return what they hold, take, or have computed."""

W = "double[3] w = {0.5, 2.0, 1.5}"
V = "double[3] v = {-0.7, 0.3, 1.1}"

BODIES = {
    "loop-scan-output": f"""g (double[N,3] X, int64 n, bool c) => (double[N,3] Y, double[K,3] S) {{
        Y, S = Loop(n, c, X) <body = b (int64 i, bool ci, double[N,3] x)
            => (bool co, double[N,3] y, double[3] w) <{W}> {{ co = Identity(ci) y = Mul(x, w) }}> }}""",
    "loop-scan-output-Constant": """g (double[N,3] X, int64 n) => (double[N,3] Y, double[K,3] S) {
        Y, S = Loop(n, , X) <body = b (int64 i, bool ci, double[N,3] x)
            => (bool co, double[N,3] y, double[3] w) { co = Identity(ci)
            w = Constant<value = double[3] {0.5, 2.0, 1.5}>() y = Mul(x, w) }> }""",
    "loop-state": f"""g (double[3] s, int64 n) => (double[3] Y, double[K,3] S) {{
        Y, S = Loop(n, , s) <body = b (int64 i, bool ci, double[3] x)
            => (bool ci, double[3] w, double[3] y) <{W}> {{ a = Mul(x, w) y = Sin(a) }}> }}""",
    "loop-state-Constant": """g (double[3] s, int64 n) => (double[3] Y, double[K,3] S) {
        Y, S = Loop(n, , s) <body = b (int64 i, bool ci, double[3] x)
            => (bool ci, double[3] w, double[3] y) {
            w = Constant<value = double[3] {0.5, 2.0, 1.5}>() a = Mul(x, w) y = Sin(a) }> }""",
    "loop-state-and-scan-output": f"""g (double[3] s, int64 n) => (double[3] Y, double[K,3] S) {{
        Y, S = Loop(n, , s) <body = b (int64 i, bool ci, double[3] x)
            => (bool ci, double[3] w, double[3] w) <{W}> {{ }}> }}""",
    "loop-states-change-places": f"""g (double[3] s, double[3] r, int64 n)
        => (double[3] Y, double[3] Z, double[K,3] S) {{
        Y, Z, S = Loop(n, , s, r) <body = b (int64 i, bool ci, double[3] p, double[3] q)
            => (bool ci, double[3] q, double[3] p, double[3] p) <{W}> {{ t = Mul(p, w) }}> }}""",
    "loop-returns-its-input-and-twice": f"""g (double[3] s, int64 n)
        => (double[3] Y, double[K,3] S, double[K,3] T, double[K,3] U) {{
        Y, S, T, U = Loop(n, , s) <body = b (int64 i, bool ci, double[3] p)
            => (bool ci, double[3] q, double[3] p, double[3] q, double[3] q)
            <{W}> {{ t = Mul(p, w) q = Sin(t) }}> }}""",
    "loop-no-turn": f"""g (double[3] s, bool e) => (double[3] Y) {{
        Y = Loop(, e, s) <body = b (int64 i, bool ci, double[3] x)
            => (bool ci, double[3] w) <{W}> {{ }}> }}""",
    "loop-condition": f"""g (double[N,3] X, int64 n) => (double[N,3] Y) <{W}> {{
        Y = Loop(n, , X) <body = b (int64 i, bool ci, double[N,3] x) => (bool co, double[N,3] y)
            <bool co = {{1}}> {{ y = Mul(x, w) }}> }}""",
    "loop-condition-stops": f"""g (double[N,3] X, bool c) => (double[N,3] Y) <{W}> {{
        Y = Loop(, c, X) <body = b (int64 i, bool ci, double[N,3] x) => (bool co, double[N,3] y)
            <bool co = {{0}}> {{ y = Mul(x, w) }}> }}""",
    "loop-condition-Constant": f"""g (double[N,3] X, int64 n, bool c) => (double[N,3] Y) <{W}> {{
        Y = Loop(n, c, X) <body = b (int64 i, bool ci, double[N,3] x) => (bool co, double[N,3] y) {{
            co = Constant<value = bool {{1}}>() y = Mul(x, w) }}> }}""",
    "scan-state": f"""g (double[3] s, double[N,3] X) => (double[3] Y, double[K,3] S) {{
        Y, S = Scan<num_scan_inputs = 1, body = b (double[3] a, double[3] u)
            => (double[3] w, double[3] y) <{W}> {{ t = Mul(a, u) y = Sin(t) }}>(s, X) }}""",
    "scan-output": f"""g (double[3] s, double[N,3] X) => (double[3] Y, double[3,K] S) {{
        Y, S = Scan<num_scan_inputs = 1, scan_output_axes = [1], scan_output_directions = [1],
            scan_input_directions = [1], body = b (double[3] a, double[3] u)
            => (double[3] y, double[3] w) <{W}> {{ t = Mul(a, u) v = Mul(t, w) y = Sin(v)
            }}>(s, X) }}""",
    "scan-hands-on": f"""g (double[3] s, double[N,3] X) => (double[3] Y, double[K,3] S, double[K,3] T) {{
        Y, S, T = Scan<num_scan_inputs = 1, body = b (double[3] a, double[3] u)
            => (double[3] v, double[3] w, double[3] h) <{W}> {{ h = Identity(u) v = Identity(a)
            }}>(s, X) }}""",
    "loop-names-of-the-outer-graph": """g (double[3] s, int64 n) => (double[3] Y, double[3] Z)
        <double[3] w = {0.1, 0.2, 0.3}> { a = Add(s, w) t = Tanh(a)
        Y = Loop(n, , s) <body = b (int64 i, bool ci, double[3] x) => (bool ci, double[3] y)
            <double[3] w = {0.4, 0.5, -0.6}> { b = Add(x, w) u = Tanh(b) y = Mul(u, s) }>
        Z = Mul(Y, t) }""",
    "if-computed-and-initializer-of-one-name": """g (double[3] s, bool e) => (double[3] Y) {
        Y = If(e) <then_branch = t () => (double[3] p) { w = Sin(s) p = Tanh(w) },
            else_branch = f () => (double[3] w) <double[3] w = {0.5, 2.0, 1.5}> { }> }""",
    "names-of-inputs-and-initializers": """g (double[3] s, int64 n, bool c) => (double[3] Y) {
        p = Loop(n, , s) <body = b (int64 i, bool ci, double[3] w) => (bool ci, double[3] y) {
            y = Sin(w) }>
        q = If(c) <then_branch = t () => (double[3] w) <double[3] w = {0.5, 2.0, 1.5}> { },
            else_branch = f () => (double[3] u) <double[2,3] w = {1, 2, 3, 4, 5, 6}> {
            k = Constant<value = int64[1] {0}>() u = ReduceSum<keepdims = 0>(w, k) }>
        Y = Mul(p, q) }""",
    "if-initializer": f"""g (double[N,3] X, bool c) => (double[N,3] Z) <{V}> {{
        Y = If(c) <then_branch = t () => (double[3] w) <{W}> {{ }},
            else_branch = f () => (double[3] y) {{ y = Identity(v) }}>
        Z = Mul(X, Y) }}""",
    "if-initializer-not-taken": f"""g (double[N,3] X, bool e) => (double[N,3] Z) <{V}> {{
        Y = If(e) <then_branch = t () => (double[3] w) <{W}> {{ }},
            else_branch = f () => (double[3] y) {{ y = Identity(v) }}>
        Z = Mul(X, Y) }}""",
    "if-of-a-constant": f"""g (double[N,3] X) => (double[N,3] Z) <bool t = {{1}}> {{
        A = Sin(X)
        Y = If(t) <then_branch = b () => (double[N,3] B) <{W}> {{ q = Mul(X, w) B = Cos(q) }},
            else_branch = e () => (double[N,3] r) {{ r = Neg(X) }}>
        Z = Mul(A, Y) }}""",
    "if-same-names": f"""g (double[N,3] X, bool c) => (double[N,3] Z, double[N,3] Y) {{
        A, B = If(c) <then_branch = t () => (double[3] w, double[3] u) <{W}> {{ u = Identity(w) }},
            else_branch = f () => (double[3] w, double[3] u)
            <double[3] w = {{1, 2, 3}}> {{ u = Sin(w) }}>
        e = Not(c)
        C = If(e) <then_branch = t () => (double[3] w) <{W}> {{ }},
            else_branch = f () => (double[3] w) {{ w = Constant<value = double[3] {{3, 1, 2}}>() }}>
        P = Mul(X, A) Z = Mul(P, B) Y = Mul(X, C) }}""",
    "if-nested": f"""g (double[N,3] X, bool c, int64 n) => (double[N,3] Z) {{
        Y = If(c) <then_branch = t () => (double[3] p) {{
                p = If(c) <then_branch = t2 () => (double[3] w) <{W}> {{ }},
                    else_branch = f2 () => (double[3] q) <{V}> {{ q = Sin(v) }}> }},
            else_branch = f () => (double[3] w) <{W}> {{ }}>
        Z = Loop(n, , X) <body = b (int64 i, bool ci, double[N,3] x)
            => (bool ci, double[N,3] y) {{ t = Mul(x, Y)
            h = If(ci) <then_branch = t3 () => (double[3] w) <{W}> {{ }},
                else_branch = f3 () => (double[3] v) <{V}> {{ }}>
            y = Add(t, h) }}> }}""",
    "input-is-output": f"""g (double[N,3] X, double[3] s) => (double[N,3] Y, double[3] s) <{W}> {{
        a = Mul(X, w) Y = Mul(a, s) }}""",
    "input-is-only-output": "g (double[N,3] X, double[3] s) => (double[N,3] X, double[3] s) { }",
    "initializer-is-output": f"""g (double[N,3] X) => (double[N,3] Y, double[3] w) <{W}> {{
        Y = Mul(X, w) }}""",
    "Constant-is-output": """g (double[N,3] X) => (double[N,3] Y, double[3] w) {
        w = Constant<value = double[3] {0.5, 2.0, 1.5}>() Y = Mul(X, w) }""",
    "intermediate-is-output": f"""g (double[N,3] X) => (double[N,3] Y, double[N,3] h) <{W}> {{
        h = Mul(X, w) Y = Sin(h) }}""",
    "output-twice": "g (double[N,3] X) => (double[N,3] Y, double[N,3] Y) { Y = Tanh(X) }",
    "output-three-times": f"""g (double[N,3] X) => (double[N,3] Y, double[3] w, double[N,3] Y,
        double[N,3] Y, double[3] w) <{W}> {{ t = Mul(X, w) Y = Tanh(t) }}""",
    "output-of-loop-twice": f"""g (double[3] s, int64 n) => (double[3] Y, double[K,3] S, double[3] Y)
        {{ Y, S = Loop(n, , s) <body = b (int64 i, bool ci, double[3] x)
            => (bool ci, double[3] y, double[3] w) <{W}> {{ y = Mul(x, w) }}> }}""",
    "input-is-output-twice": "g (double[3] s) => (double[3] s, double[3] Y, double[3] s) { Y = Sin(s) }",
}

SPARSE = {
    "model": f"""g (double[N,3] X) => (double[N,3] Y) <double[3,3] S = {{1,0,0,0,2,0,0,3,0}}, {V}> {{
        a = MatMul(X, S) Y = Add(a, v) }}""",
    "captured": f"""g (double[N,3] X, int64 n) => (double[N,3] Y)
        <double[3,3] S = {{0,0,1,0,2,0,0,3,0}}, {V}> {{
        Y = Loop(n, , X) <body = b (int64 i, bool ci, double[N,3] x) => (bool ci, double[N,3] y) {{
            a = MatMul(x, S) y = Add(a, v) }}> }}""",
    "body": """g (double[N,3] X, int64 n) => (double[N,3] Y) {
        Y = Loop(n, , X) <body = b (int64 i, bool ci, double[N,3] x) => (bool ci, double[N,3] y)
            <double[3,3] S = {0,0,1,0,2,0,0,3,0}> { a = MatMul(x, S) y = Tanh(a) }> }""",
}
