#!/usr/bin/env bash
# Build the image for real and try it out: see deploy/image/check.py for what has to hold.
#
#   sudo deploy/build-test.sh [--install] [--base IMAGE] [--torch auto|cpu|cuda]
#
#   --install   install buildah and debootstrap by apt-get where they are missing
#   --base      build on this image instead of on a Debian made by debootstrap, which needs no image registry
#   --torch     the build argument TORCH (auto: the build that pip's settings here lead to)
#
# DEBIAN_MIRROR names another mirror for debootstrap. Needs root, Linux, Python 3.11 with pip, 8 GB below TMPDIR, and
# neither an overlay file system nor control groups. Leaves nothing behind but the packages that --install brought.
set -euo pipefail
cd "$(dirname "$0")/.."

SUITE=bookworm # the Debian release with Python 3.11
MISSING=69     # exit code where something has to be installed first

say() { printf 'build-test: %s\n' "$*"; }
fail() {
    local code=$1
    shift
    printf 'build-test: %s\n' "$*" >&2
    exit "$code"
}

install=no base='' torch=auto
while (($#)); do
    case $1 in
        --install) install=yes ;;
        --base) base=${2:?--base needs the name of an image} && shift ;;
        --torch) torch=${2:?--torch needs auto, cpu or cuda} && shift ;;
        -h | --help) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0 ;;
        *) fail 2 "unknown option $1; --help lists them" ;;
    esac
    shift
done
((EUID == 0)) || fail 1 'run it as root: a root file system cannot be made otherwise'
needed=(buildah)
[[ $base ]] || needed+=(debootstrap)
missing=()
for name in "${needed[@]}"; do command -v "$name" >/dev/null || missing+=("$name"); done
if ((${#missing[@]})); then
    [[ $install = yes ]] || fail $MISSING "needs the Debian packages ${missing[*]}: install them, or pass --install"
    say "installing ${missing[*]}"
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}" >/dev/null \
        || fail $MISSING "apt-get cannot install ${missing[*]}; is 'apt-get update' due?"
fi

buildah() { command buildah --storage-driver vfs --root "$work/storage" --runroot "$work/run" "$@"; }
work=$(mktemp -d "${TMPDIR:-/tmp}/sentinel-image-XXXXXX")
export TMPDIR=$work BUILDAH_ISOLATION=chroot
# One file system only: should anything still be mounted below, it is not what is removed.
trap 'buildah umount -a >/dev/null 2>&1 || true; rm -rf --one-file-system "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

if [[ ! $base ]]; then
    say "making a $SUITE with Python by debootstrap"
    debootstrap --variant=minbase --include=python3,ca-certificates "$SUITE" "$work/base" \
        ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"} >"$work/debootstrap.log" 2>&1 \
        || { tail -n 20 "$work/debootstrap.log" >&2 && fail 1 'debootstrap failed'; }
    # What the python images leave out as well.
    rm -rf "$work"/base/var/cache/apt/* "$work"/base/var/lib/apt/lists/* "$work"/base/usr/share/{doc,info,locale,man}
    base=localhost/base
    container=$(buildah from scratch)
    buildah add -q "$container" "$work/base" / >/dev/null
    buildah commit -q --format docker --rm "$container" "$base" >/dev/null
    rm -rf --one-file-system "$work/base"
fi

# A clean copy of what the image is built from, with decoys that must not get into it.
canary="canary-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')"
mkdir "$work/context"
tar --exclude=__pycache__ -cf - Dockerfile .dockerignore LICENSE README.md constraints.txt pyproject.toml deploy node \
    protocol verifier | tar -xf - -C "$work/context"
for decoy in identity.key state/identity.key node/identity.key .env pip.conf deploy/invite; do
    mkdir -p "$work/context/$(dirname "$decoy")"
    echo "$canary" >"$work/context/$decoy"
done

mounts=()
while read -r mount; do mounts+=(--volume "$mount"); done < <(python3 deploy/image/pip_settings.py "$work/pip.conf")
echo "# $canary" >>"$work/pip.conf"
say "building on $base with TORCH=$torch; this takes some minutes"
begun=$SECONDS
buildah build --format docker --build-arg "BASE=$base" --build-arg "TORCH=$torch" \
    --build-arg "VERSION=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)" \
    --build-arg "REVISION=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)" \
    --secret "id=pip,src=$work/pip.conf" "${mounts[@]}" -t localhost/sentinel-swarm "$work/context" \
    >"$work/build.log" 2>&1 || { tail -n 30 "$work/build.log" >&2 && fail 1 'the build failed'; }
grep '^fill_venv: ' "$work/build.log" || true
say "built in $((SECONDS - begun)) s"
if grep -qF "$canary" "$work/build.log"; then fail 1 'the log of the build tells the secret'; fi

container=$(buildah from localhost/sentinel-swarm)
root=$(buildah mount "$container")
buildah inspect --type image localhost/sentinel-swarm >"$work/inspect.json"
python3 deploy/image/check.py --root "$root" --config "$work/inspect.json" --canary "$canary"

say 'sizes:'
buildah images --format '  {{.Name}} {{.Size}}'
printf "  %s MB compressed\n" "$(($(tar -C "$root" -cf - . | gzip | wc -c) / 1000000))"
du -sm "$root"/opt/sentinel/lib/python3*/site-packages/* | sort -rn | head -n 5 \
    | while read -r megabytes path; do printf '  %s MiB %s\n' "$megabytes" "$(basename "$path")"; done
say 'passed'
