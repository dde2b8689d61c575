#!/usr/bin/env bash
# A producer in bash: redis-cli, and standard Unix tools. REDIS_URL is the address of Redis.
set -euo pipefail
export LC_ALL=C # so that tools handle bytes

redis() { redis-cli --no-auth-warning -u "$REDIS_URL" "$@"; }
result() { redis BLPOP "carpool:{$1}:result:$2" 10 | sed 1d; } # the key comes first, then the result

# 1. One request. Its correlation ID is the entry ID, which XADD returns.
id=$(redis XADD 'carpool:{square}:requests' '*' body 7)
printf '{"step":"json","id":"%s","envelope":%s}\n' "$id" "$(result square "$id")"

# 2. A tensor, in and out. In msgpack 83 is a map of three, a0 + n a string of n bytes, 92 a list of two,
# c4 n are n bytes.
matrix() {
  printf '\x83\xa8datatype\xa5INT16\xa5shape\x92\x02\x03\xa4data\xc4\x0c\1\0\2\0\3\0\4\0\5\0\6\0'
}
hex() { od -An -v -tx1 | tr -d ' \n'; }
texts() { tr -cs '[:print:]' '\n'; } # the printable strings in msgpack, one per line
after() { grep -xA 1 "$1" | sed -n 2p; }
int16() { for ((at = 0; at < ${#1}; at += 4)); do echo $((16#${1:at+2:2}${1:at:2})); done | paste -sd, -; }

reply=$(mktemp) # a variable cannot hold bytes of value 0
trap 'rm "$reply"' EXIT
id=$(matrix | redis -x XADD 'carpool:{transpose}:requests' '*' content_type application/msgpack body)
result transpose "$id" >"$reply"
bytes=$(hex <"$reply")
shape=${bytes#*"$(printf shape | hex)92"} data=${bytes#*"$(printf data | hex)c40c"}
printf '{"step":"tensor","id":"%s","sent":"%s","status":"%s","datatype":"%s","shape":[%d,%d],"values":[%s]}\n' \
  "$id" "$(matrix | hex)" "$(texts <"$reply" | after status)" "$(texts <"$reply" | after datatype)" \
  "0x${shape:0:2}" "0x${shape:2:2}" "$(int16 "${data:0:24}")"

# 3. Two hundred requests in flight, and one stream of replies.
name=sh-$$
for n in {0..199}; do
  echo "XADD carpool:{square}:requests * reply_to $name correlation_id $name:$n body $n"
done | redis >/dev/null
last=0 answers=()
while ((${#answers[@]} < 200)); do
  {
    read -r _ && read -r last && read -r _ || exit # stream, entry ID, `results`; then the results
    mapfile -t found < <(texts)
  } < <(redis XREAD COUNT 1 BLOCK 10000 STREAMS "carpool:{square}:replies:$name" "$last")
  for at in "${!found[@]}"; do
    case ${found[at]} in
      correlation_id) id=${found[at + 1]} ;;
      body) answers+=("\"$id\":${found[at + 1]}") ;;
    esac
  done
done
printf '{"step":"stream","reply_to":"%s","answers":{%s}}\n' "$name" "$(IFS=, && echo "${answers[*]}")"

# 4. A request that expires while it waits.
id=$(redis XADD 'carpool:{away}:requests' '*' expiration 50 body 1)
printf '{"step":"expiration","id":"%s","envelope":%s}\n' "$id" "$(result away "$id")"

# 5. An invalid request.
id=$(redis XADD 'carpool:{square}:requests' '*' priority 11 body 7)
printf '{"step":"invalid","id":"%s","envelope":%s}\n' "$id" "$(result square "$id")"

# 6. Two withdrawn requests: one by its entry, without a result; one by its correlation ID, with a result.
removed=$(redis XDEL 'carpool:{away}:requests' "$(redis XADD 'carpool:{away}:requests' '*' body 1)")
id=$(redis XADD 'carpool:{away}:requests' '*' body 1)
redis XADD 'carpool:{away}:requests' '*' withdraw "$id" >/dev/null
printf '{"step":"withdrawal","removed":%d,"id":"%s","envelope":%s}\n' "$removed" "$id" "$(result away "$id")"
