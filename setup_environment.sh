# Sourced by quickstart.sh and test.sh: makes .venv and installs $REQUIREMENTS, by default requirements.txt, into it.
set -eu
cd "$(dirname "$0")"

fail() {
    echo "error: $1" >&2
    exit 2
}

python=""
for candidate in "${PYTHON:-}" python3.13 python3.12 python3.11 python3; do
    if [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 &&
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] || fail "Python 3.11 or newer is missing: apt-get install python3 python3-venv, or set PYTHON"
if ! "$python" -c 'import venv, ensurepip, sqlite3' 2>/dev/null; then
    fail "$python lacks venv, ensurepip or sqlite3: apt-get install python3-venv"
fi
has_pip() { .venv/bin/python -m pip --version >/dev/null 2>&1; }
has_pip || { "$python" -m venv .venv >/dev/null 2>&1 && has_pip; } || "$python" -m venv --clear .venv ||
    fail "could not make the virtual environment .venv"
for requirements in ${REQUIREMENTS:-requirements.txt}; do
    if ! cmp -s "$requirements" ".venv/installed-$requirements"; then
        echo "installing $requirements into .venv ..."
        .venv/bin/python -m pip install --quiet --disable-pip-version-check -r "$requirements" ||
            fail "pip could not install $requirements; its message is above"
        cp "$requirements" ".venv/installed-$requirements"
    fi
done
