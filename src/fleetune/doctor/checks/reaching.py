"""Checks of the way to each host: ssh, a Python with fleetune, and its clock."""

from __future__ import annotations

from fleetune.cluster.remote import why_ssh_failed
from fleetune.doctor.examine import Examination, Trouble, View
from fleetune.doctor.finding import Finding, Verdict, about, failure, ok, warning

_NEAR_S, _FAR_S = 1.0, 300.0
"""Clocks that are further apart confuse logs and file times; beyond the second, munge and Kerberos refuse."""


def ssh(examination: Examination) -> list[Finding]:
    """Whether ssh reaches every host without a password, and this machine itself."""
    found = [about(_reached(view), "ssh", view.name) for view in examination.views if not view.host.is_here]
    here = next((view for view in examination.views if view.host.is_here), None)
    if here is not None and examination.to_itself is not None:
        found.append(about(_reached_itself(examination.to_itself, here.host.target), "ssh to itself", here.name))
    return found


def _reached(view: View) -> Verdict:
    trouble = view.trouble
    if trouble is not None and trouble.kind == "ssh":
        reason, fix = why_ssh_failed(trouble.said)
        return failure(f"ssh: {reason}", fix.replace("HOST", view.host.target))
    if trouble is not None and trouble.kind == "silent":
        return failure(
            f"ssh: no answer within {trouble.within_s:g} s", f"is it up? try `ssh {view.host.target} uptime`"
        )
    return ok("reached without a password")


def _reached_itself(said: str, target: str) -> Verdict:
    if not said:
        return ok("the head reaches itself")
    reason, fix = why_ssh_failed(said)
    return warning(
        f"the head cannot ssh to itself: {reason}. fleetune does not need that, some tools do",
        fix.replace("HOST", target),
    )


# ---- Python


def python(examination: Examination) -> list[Finding]:
    """Whether every host that ssh reaches has this Python, and fleetune in it."""
    found = []
    for view in examination.views:
        if view.trouble is not None and view.trouble.kind not in ("ssh", "silent"):
            found.append(about(_without_python(view, view.trouble), "python", view.name))
        elif view.facts is not None:
            found.append(about(ok(f"{view.facts.software.executable} with fleetune"), "python", view.name))
    return found


def _without_python(view: View, trouble: Trouble) -> Verdict:
    fix = f"fleetune setup --hosts {view.host.target}"
    last = trouble.said.splitlines()[-1] if trouble.said else "it said nothing"
    reasons = {
        "no python": f"this Python is not there ({last}); {view.python or 'the shell does not answer either'}",
        "no fleetune": "Python is there, but fleetune is not installed in it",
        "other fleetune": f"another version of fleetune is installed there ({last})",
    }
    return failure(reasons.get(trouble.kind, f"the probe failed: {last}"), fix)


# ---- clocks


def clocks(examination: Examination) -> list[Finding]:
    """Whether the clocks agree with the head's, as far as the way there lets one tell."""
    told = [(view, view.clock) for view in examination.views if view.clock is not None]
    if len(told) < 2:
        return []
    zero = told[0][1].offset_s
    apart = {view.name: clock.offset_s - zero for view, clock in told}
    unsure = max(clock.uncertainty_s for _, clock in told)
    found = []
    for name, offset in apart.items():
        if abs(offset) - unsure > _NEAR_S:
            reason = f"its clock is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} the head's"
            fix = f"ssh {name} sudo chronyc makestep    (or: sudo timedatectl set-ntp true)"
            verdict = failure if abs(offset) > _FAR_S else warning
            found.append(about(verdict(reason, fix), "clocks", name))
    if not found:
        furthest = max(map(abs, apart.values()))
        within = max(furthest + unsure, 0.001)
        found.append(about(ok(f"equal within {within:.3f} s"), "clocks", *apart))
    return found
