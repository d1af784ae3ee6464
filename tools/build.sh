#!/usr/bin/env bash
# Builds one program with Go, and says meanwhile how far it is: build.sh FOLDER PACKAGE OUTPUT [TAGS]
set -euo pipefail
folder=$1 package=$2 output=$3 tags=${4:-}

say() {
    printf '%s: %s (%d s)\n' "$folder" "$1" "$SECONDS"
}

# Counts what `go build -v` lists, one module or package a line, and says so every ten seconds;
# anything else is an error.
show() {
    local downloaded=0 compiled=0 said=0 line
    while IFS= read -r line; do
        case $line in
        'go: downloading '*) downloaded=$((downloaded + 1)) ;;
        *[[:space:]]*) printf '%s: %s\n' "$folder" "$line" >&2 ;;
        *) compiled=$((compiled + 1)) ;;
        esac
        if ((SECONDS - said >= 10)); then
            said=$SECONDS
            say "$downloaded modules downloaded, $compiled packages compiled"
        fi
    done
    say "$downloaded modules downloaded, $compiled packages compiled in all"
}

cd "$(dirname "$0")/$folder"
say "go build $package${tags:+ with $tags}, into $output; minutes if Go's caches are empty"
"${GO:-go}" build -v -mod=readonly -trimpath -buildvcs=false -tags "$tags" -ldflags '-s -w' -o "$output" "$package" 2>&1 | show
say "done, $(du -h "$output" | cut -f1)"
