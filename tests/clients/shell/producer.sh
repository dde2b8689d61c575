#!/usr/bin/env bash
# A producer in bash: redis-cli, and what every Unix has beside it. REDIS_URL says where Redis is.
set -euo pipefail
export LC_ALL=C # bytes are bytes

redis() { redis-cli --no-auth-warning -u "$REDIS_URL" "$@"; }
result() { redis BLPOP "carpool:{$1}:result:$2" 10 | sed 1d; } # the key comes first, then the result

# 1. One request. Its correlation ID is the entry's, which XADD returns.
id=$(redis XADD 'carpool:{square}:requests' '*' body 7)
printf '{"step":"json","id":"%s","envelope":%s}\n' "$id" "$(result square "$id")"

# 2. A tensor, in and out. In msgpack 83 is a map of three, a0 + n a text of n bytes, 92 a list of two,
# c4 n are n bytes.
matrix() {
  printf '\x83\xa8datatype\xa5INT16\xa5shape\x92\x02\x03\xa4data\xc4\x0c\1\0\2\0\3\0\4\0\5\0\6\0'
}
hex() { od -An -v -tx1 | tr -d ' \n'; }
texts() { tr -cs '[:print:]' '\n'; } # what is readable in msgpack, a line each
after() { grep -xA 1 "$1" | sed -n 2p; }
int16() { for ((at = 0; at < ${#1}; at += 4)); do echo $((16#${1:at+2:2}${1:at:2})); done | paste -sd, -; }

reply=$(mktemp) # a variable could not hold it: it has bytes of 0
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
    read -r _ && read -r last && read -r _ || exit # the stream, an entry's ID, `results`, and then what they are
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

# 5. A request that is not understood.
id=$(redis XADD 'carpool:{square}:requests' '*' priority 11 body 7)
printf '{"step":"invalid","id":"%s","envelope":%s}\n' "$id" "$(result square "$id")"

# 6. Two requests that are taken back: by entry, which nobody answers, and by correlation ID, which is answered.
removed=$(redis XDEL 'carpool:{away}:requests' "$(redis XADD 'carpool:{away}:requests' '*' body 1)")
id=$(redis XADD 'carpool:{away}:requests' '*' body 1)
redis XADD 'carpool:{away}:requests' '*' withdraw "$id" >/dev/null
printf '{"step":"withdrawal","removed":%d,"id":"%s","envelope":%s}\n' "$removed" "$id" "$(result away "$id")"
