-- refuse: waiting requests are answered without being dispatched (expired, refused, withdrawn, not understood).
-- Nothing is written for an entry that is no longer there: its requests were answered, withdrawn or dispatched.
--
-- KEYS  1 requests   2 order   3 held   4.. the keys of results
-- ARGV  result TTL (ms)
--       E, then E times: entry ID, payload of its requests that stay ('' if none), their arrival (ms), their
--          tickets; number of results, and for each: index in KEYS, kind, ticket or '', payload
-- Returns for each entry the new ID of what stayed, '' if nothing did, false if the entry was gone
-- O(entries + results), and O(bytes) for the payloads.
local at = 1
local function take()
  local value = ARGV[at]
  at = at + 1
  return value
end

local ttl_ms = take()
local ordered = false
local answers = {}
for e = 1, tonumber(take()) do
  local id, payload, arrival_ms, tickets = take(), take(), take(), take()
  local there = redis.call('XDEL', KEYS[1], id) == 1
  for _ = 1, tonumber(take()) do
    local key, kind, ticket, result = KEYS[tonumber(take())], take(), take(), take()
    ordered = ordered or ticket ~= ''
    if there then deliver_in_order(KEYS[3], ticket, key, kind, result, ttl_ms) end
  end
  if not there then
    answers[e] = false
  elseif payload == '' then
    answers[e] = ''
  else
    answers[e] = put_back(KEYS[1], KEYS[3], payload, arrival_ms, tickets)
  end
end
if ordered then release(KEYS[2], KEYS[3]) end
return answers
