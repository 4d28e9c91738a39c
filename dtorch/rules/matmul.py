"""Products of matrices."""

from __future__ import annotations

from dtorch.rules.dsl import rule

rule("mm", "mk,kn->mn", linear="a*b", shape="letters")
rule("bmm", "bmk,bkn->bmn", linear="a*b", shape="letters")
rule("mv", "mk,k->m", linear="a*b", shape="letters")
rule("dot vdot", "k,k->", linear="a*b", shape="letters")
rule("addmm", "?mn,mk,kn->mn", linear="a+b*c", lifts=True, shape="letters")
rule("baddbmm", "?bmn,bmk,bkn->bmn", linear="a+b*c", lifts=True, shape="letters")
rule("addmv", "?m,mk,k->m", linear="a+b*c", lifts=True)
rule("addbmm", "?mn,bmk,bkn->mn", linear="a+b*c", lifts=True)
rule("linear", "...k,nk,n->...n", linear="a*b+c", lifts=True, shape="letters")
