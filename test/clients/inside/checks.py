"""Counts checks; imported by the scripts beside it, in the clients' own environments: standard library only."""
num_passed = 0


def expect(condition: object, what: str, seen: object = "") -> None:
    """Ends the script with the reason when `condition` is false."""
    global num_passed
    if not condition:
        raise SystemExit(f"failed: {what}; seen: {seen!r}")
    num_passed += 1


def done() -> None:
    print(f"all {num_passed} checks passed")
