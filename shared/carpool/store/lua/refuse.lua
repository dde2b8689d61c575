-- refuse: waiting requests are answered without being dispatched (expired, over a limit, withdrawn, invalid).
-- Entries without requests (withdrawals) are only removed. Nothing is written for an entry that is no longer in the
-- stream: it was removed by XDEL, or dispatched or answered already. What all of this changes in sequences is written
-- with it, and which sequences end because they were idle. Only the active batcher may do so: another one, which was
-- paused, has an old copy of the request stream, by which the queue may be full, and older states of sequences.
--
-- KEYS  1 requests   2 order   3 tickets   4 statistics   5 batcher, if ARGV[2] is not ''
--       .. the keys of results, of stored bodies, of sequences and of inboxes
-- ARGV  1 result TTL (ms)
--       2 the name of this batcher, '' if it need not be active
--       3.. list of entries: ID; what to put back (see put_back.lua); number of results, and their time from arrival
--           added up (us); list of results: index in KEYS, kind, ranges of tickets or '', payload; list of alike
--           results for lists of their own (see deliver.lua, `deliver_alike`); list of stored bodies to delete: index
--           in KEYS
--           changes of sequences (see sequence.lua)
--           list of messages to processes of a bound model: index in KEYS of the inbox, field, value
-- Returns 'NOT_ACTIVE' if another batcher has the lease, or none: nothing was written. Else for each entry
--         { 'REMOVED' } | { 'PUT_BACK', IDs of the new entries ... } | { 'MISSING' }
-- O(entries + results), and O(bytes) for the payloads; if all keys have one hash in Lua, O(results * results). The
-- caller bounds both: see `carpool_batcher.refusals`.
-- GRANT batcher requests xdel
-- GRANT batcher body unlink
-- GRANT batcher batcher get
if ARGV[2] ~= '' and redis.call('GET', KEYS[5]) ~= ARGV[2] then return 'NOT_ACTIVE' end
if ARGV[2] ~= '' then redis.call('XDEL', KEYS[1], '0-0') end -- must be the first write: see deliver.lua
local ttl_ms = ARGV[1]
local take = argument_reader(3)
local arrived = {}
local replies = {}
local refused, refused_us = 0, 0
for e = 1, tonumber(take()) do
  local is_missing = redis.call('XDEL', KEYS[1], take()) == 0
  if is_missing then
    skip_put_back(take)
    replies[e] = { 'MISSING' }
  else
    local new_ids = put_back(KEYS[1], KEYS[3], take)
    replies[e] = #new_ids == 0 and { 'REMOVED' } or { 'PUT_BACK', unpack(new_ids) }
  end
  local results, total_us = take(), take()
  if not is_missing then refused, refused_us = refused + results, refused_us + total_us end
  for _ = 1, tonumber(take()) do
    local key, kind, ranges, result = KEYS[tonumber(take())], take(), take(), take()
    if not is_missing then take_result(arrived, ranges, key, kind, result, ttl_ms) end
  end
  for _ = 1, tonumber(take()) do deliver_alike(take, ttl_ms, is_missing) end
  for _ = 1, tonumber(take()) do
    local key = KEYS[tonumber(take())]
    if not is_missing then redis.pcall('UNLINK', key) end
  end
end
if refused > 0 then count_failed(KEYS[4], refused, refused_us) end
change_sequences(take, true)
for _ = 1, tonumber(take()) do tell_process(KEYS[tonumber(take())], take(), take()) end
if #arrived > 0 then release(KEYS[2], KEYS[3], arrived) end
collect_arguments()
return replies
