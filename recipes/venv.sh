# Sourced from the repository's top. Makes or reuses .venv with this checkout in it, with the pinned versions.

# install_into_venv EXTRA: does nothing when what is asked for is installed already.
install_into_venv() {
    local extra=$1 python=${PYTHON:-python3} bin=.venv/bin stamp=.venv/installed-$1 wanted
    [ -d .venv ] || "$python" -m venv .venv
    [ -d "$bin" ] || bin=.venv/Scripts
    wanted=$(cat pyproject.toml setup.py constraints.txt | cksum)
    if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
        echo "Installing into .venv (extra: $extra) ..."
        # torch first and alone: it is by far the largest, and pinned.
        "$bin/python" -m pip install --quiet --constraint constraints.txt torch
        "$bin/python" -m pip install --quiet --constraint constraints.txt --editable ".[$extra]"
        echo "$wanted" >"$stamp"
    fi
}
