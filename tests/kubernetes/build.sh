#!/usr/bin/env bash
# Builds a real kube-apiserver, kube-controller-manager and kube-scheduler from Debian's source package
# (v1.20) and prints the folder that holds them, with links to Debian's etcd. About eight minutes on two
# cores; the result is kept in the user's cache, and a second call only prints the folder.
#
# Needs Debian 12 (its Go 1.19 and its source package) and, where packages are missing, root.
set -euo pipefail

cache=${LIGHTNING_RAY_CACHE:-$HOME/.cache/lightning_ray}/kubernetes-1.20.2
bin=$cache/bin
programs=(kube-apiserver kube-controller-manager kube-scheduler)
say() { echo "build.sh: [${SECONDS}s] $*" >&2; }

mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9
if [[ -e $bin/built ]]; then
  echo "$bin"
  exit 0
fi

packages=(golang-1.19-go golang-github-modern-go-reflect2-dev etcd-server etcd-client dpkg-dev)
missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
if ((${#missing[@]})); then
  say "installing ${missing[*]}"
  apt-get update -qq >&2
  # Debian starts what it installs; policy-rc.d in containers and images refuses, and that is not an error.
  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${missing[@]}" >&2
fi

work=$(mktemp -d "$cache/build.XXXX")
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/gopath/src/k8s.io"
sed -s 's/^Types: .*/Types: deb-src/' /etc/apt/sources.list.d/debian.sources >"$work/src.sources"
apt=(-o "Dir::Etc::sourcelist=$work/src.sources" -o Dir::Etc::sourceparts=-
  -o "Dir::State::lists=$work/lists" -o APT::Sandbox::User=root)
say "fetching the source"
apt-get "${apt[@]}" update -qq >&2
(cd "$work" && apt-get "${apt[@]}" source -qq kubernetes >&2)

export GO111MODULE=off GOPATH=$work/gopath GOCACHE=$work/gocache CGO_ENABLED=0 GOFLAGS= GOPROXY=off
export PATH=/usr/lib/go-1.19/bin:$PATH
source=$GOPATH/src/k8s.io/kubernetes
mv "$work"/kubernetes-*/ "$source"
# The vendored one crashes under Go 1.18 and newer as soon as there is a custom resource.
rm -rf "$source/vendor/github.com/modern-go/reflect2"
cp -rL /usr/share/gocode/src/github.com/modern-go/reflect2 "$source/vendor/github.com/modern-go/"
cd "$source"

say "generating the OpenAPI definitions"
module=k8s.io/kubernetes
go build -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
mapfile -t tagged < <(find -L cmd pkg plugin vendor/k8s.io -name '*.go' -not -path '*/_output/*' -print0 |
  xargs -0 grep -l '+k8s:openapi-gen=' | xargs -n1 dirname | sort -u |
  grep -vE '^vendor/k8s.io/(code-generator|sample-apiserver|sample-controller)/')
inputs=$(printf ",$module/%s" "${tagged[@]}")
"$work/openapi-gen" --go-header-file hack/boilerplate/boilerplate.generatego.txt -i "${inputs#,}" \
  -p "$module/pkg/generated/openapi" -O zz_generated.openapi -o "$GOPATH/src" -r /dev/null >&2

version=$module/vendor/k8s.io
flags="-s -w"
for package in k8s.io/component-base k8s.io/client-go/pkg "$version/component-base" "$version/client-go/pkg"; do
  flags+=" -X $package/version.gitVersion=v1.20.2 -X $package/version.gitMajor=1 -X $package/version.gitMinor=20"
  flags+=" -X $package/version.gitTreeState=clean -X $package/version.gitCommit=debian"
done
mkdir -p "$bin"
for program in "${programs[@]}"; do
  say "building $program"
  go build -ldflags "$flags" -o "$bin/$program" "./cmd/$program"
done
for program in etcd etcdctl; do
  ln -sf "$(command -v "$program")" "$bin/$program"
done
touch "$bin/built"
say "done"
echo "$bin"
