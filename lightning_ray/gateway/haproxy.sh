#!/bin/sh
# HAProxy for Ray Serve, which gives no setting for what this changes in the configuration that it
# wrote: statistics and metrics listen on loopback instead of all interfaces, the admin socket is
# its owner's, and a client has 20 seconds for its headers. While a request is spliced, which it is
# when its body comes after its headers, HAProxy 2.8 does not see that its client leaves: requests
# are not spliced. The folder must be ours alone.
set -eu
config='' before=''
for argument; do
  if [ "$before" = -f ]; then config=$argument; fi
  before=$argument
done
folder=${config%/*/*} # Ray puts a folder for each node into it
if [ ! -O "$folder" ] || [ -L "$folder" ]; then
  echo "$folder is another user's" >&2
  exit 1
fi
chmod 700 "$folder"
sed -i \
  -e '/^frontend prometheus/,/^frontend http/s/bind :/bind 127.0.0.1:/' \
  -e '/^listen stats/,$s/bind \*:/bind 127.0.0.1:/' \
  -e 's/^\( *stats socket .*\) mode 666 /\1 mode 600 /' \
  -e '/^defaults/a\    timeout http-request 20s' \
  -e '/^ *option splice-request$/d' \
  "$config"
exec "$LIGHTNING_RAY_HAPROXY" "$@"
