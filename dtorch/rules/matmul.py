"""Products of matrices."""

from __future__ import annotations

from dtorch.rules.call import Call
from dtorch.rules.dsl import rule

rule("mm", "mk,kn->mn", linear="a*b", shape="letters")
rule("bmm", "bmk,bkn->bmn", linear="a*b", shape="letters")
rule("mv", "mk,k->m", linear="a*b", shape="letters")
rule("dot vdot", "k,k->", linear="a*b", shape="letters")
rule("addmm", "?mn,mk,kn->mn", linear="a+b*c", lifts=True, shape="letters")
rule("baddbmm", "?bmn,bmk,bkn->bmn", linear="a+b*c", lifts=True, shape="letters")
rule("addmv", "?m,mk,k->m", linear="a+b*c", lifts=True, shape="letters")
# The sum goes over two dims, and its order shows in its rounding: who wants terms of it writes bmm(...).sum(0).
rule("addbmm", "?mn,bmk,bkn->mn", whole="bk", linear="a+b*c", lifts=True, shape="letters")
rule("addr", "?mn,m,n->mn", linear="a+b*c", lifts=True)
rule("linear", "...k,nk,n->...n", linear="a*b+c", lifts=True, shape="letters")


def _matmul(call: Call) -> str:
    """Vectors lose their dim; what is left of the last two dims is batch, broadcast."""
    left, right = (len(spec.shape) for spec in call.inputs)
    first = "k" if left == 1 else "...mk"
    second = "k" if right == 1 else "...kn"
    return f"{first},{second}->...{'m' if left > 1 else ''}{'n' if right > 1 else ''}"


rule("matmul", _matmul, linear="a*b", shape="letters")
