# Shared by the scripts here; sourced, from the repository's root.

say() { printf '\n== %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# One hash of all the files named on standard input, a NUL after each: names and contents.
hash_files() { sort -z | xargs -0 sha256sum | sha256sum | cut -d' ' -f1; }

# up_to_date STAMP HASH: has the work that STAMP records been done for exactly these inputs?
up_to_date() { [ "$(cat "$1" 2>/dev/null || true)" = "$2" ]; }

# What .venv should hold, as a hash: the packages that build, tests and demo are pinned to.
venv_wanted() { printf '%s\0' requirements/{build,test,demo,ici}.txt | hash_files; }
