"""Plans the slow, obvious way: one candidate after the other, in plain floats."""

from collections.abc import Callable, Sequence

Seconds = Callable[[int], float]  # drafts admitted -> seconds of the round
Candidate = tuple[int, int]  # request, draft (from 1)


def candidates(survival: Sequence[Sequence[float]], max_lens: Sequence[int]) -> list[Candidate]:
    """All drafts that may be verified: higher survival, then lower position, then lower request index."""
    drafts = [(r, j) for r, max_len in enumerate(max_lens) for j in range(1, max_len)]
    return sorted(drafts, key=lambda draft: (-survival[draft[0]][draft[1] - 1], draft[1], draft[0]))


def theta(survival: Sequence[Sequence[float]], admitted: Sequence[Candidate], seconds: Seconds) -> float:
    """Expected tokens a second."""
    tokens = 0.0
    for r, j in admitted:
        tokens += survival[r][j - 1]
    return (tokens + len(survival)) / seconds(len(admitted))


def early_stop(survival: Sequence[Sequence[float]], max_lens: Sequence[int], seconds: Seconds) -> list[int]:
    """Verify lengths by paper Algorithm 1, written out: only the next draft of each request is ever looked at."""
    lens = [1] * len(max_lens)
    admitted: list[Candidate] = []
    best = theta(survival, admitted, seconds)
    while True:
        frontier = [(r, lens[r]) for r in range(len(lens)) if lens[r] < max_lens[r]]
        if not frontier:
            return lens
        r, j = min(frontier, key=lambda draft: (-survival[draft[0]][draft[1] - 1], draft[1], draft[0]))
        value = theta(survival, [*admitted, (r, j)], seconds)
        if not value > best:
            return lens
        best = value
        admitted.append((r, j))
        lens[r] += 1


def global_budget(survival: Sequence[Sequence[float]], max_lens: Sequence[int], seconds: Seconds) -> int:
    """The best number of drafts, the smallest of equals."""
    ranked = candidates(survival, max_lens)
    values = [theta(survival, ranked[:count], seconds) for count in range(len(ranked) + 1)]
    return values.index(max(values))


def take(survival: Sequence[Sequence[float]], max_lens: Sequence[int], budget: int) -> list[int]:
    """Verify lengths when the first `budget` candidates are admitted."""
    lens = [1] * len(max_lens)
    for r, _ in candidates(survival, max_lens)[:budget]:
        lens[r] += 1
    return lens


def drafting(
    survival: Sequence[Sequence[float]], max_lens: Sequence[int], round_seconds: Callable[[int, int], float]
) -> list[bool]:
    """Whom to draft for; round_seconds(requests drafted for, drafts admitted)."""
    gains = [sum(row[: max_len - 1]) for row, max_len in zip(survival, max_lens, strict=True)]
    order = sorted(range(len(gains)), key=lambda r: (-gains[r], r))
    most = sum(gain > 0 for gain in gains)
    best, chosen = theta(survival, [], lambda _: round_seconds(0, 0)), 0
    for count in sorted({most} | {2**i for i in range(10) if 2**i < most}) if most else []:
        lens = [max_len if r in order[:count] else 1 for r, max_len in enumerate(max_lens)]
        ranked = candidates(survival, lens)
        for budget in range(len(ranked) + 1):
            value = theta(survival, ranked[:budget], lambda k, n=count: round_seconds(n, k))
            if value > best:
                best, chosen = value, count
    return [r in order[:chosen] for r in range(len(gains))]
