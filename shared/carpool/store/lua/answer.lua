-- answer: give some requests of a batch in flight their result ahead of its commit, each once.
-- A batcher does so when a deadline passes, wherever the batch is (consumer ''). A worker does so after a
-- redelivery, when it executes one request at a time: what is done stays done if it is killed again, and the
-- count of starts tells who killed it.
--
-- KEYS  1 batches   2 progress of this batch   3 order   4 held   5.. the keys of results
-- ARGV  1 consumer or ''  2 batch ID  3 epoch  4 result TTL (ms)  5 progress TTL (ms)
--       6 position that the worker starts next, '' for none
--       7 R, then R times: position in the batch, index in KEYS, kind, ticket or '', payload
-- Returns { positions answered now }, or 'FENCED' (worker), or 'SETTLED' (batcher: the batch is no longer there)
-- O(results); without a consumer also O(bytes of the batch).
if ARGV[1] == '' then
  if #redis.call('XRANGE', KEYS[1], ARGV[2], ARGV[2]) == 0 then return 'SETTLED' end
else
  local owner = redis.call('XPENDING', KEYS[1], 'workers', ARGV[2], ARGV[2], 1)[1]
  if not owner or owner[2] ~= ARGV[1] or owner[4] ~= tonumber(ARGV[3]) then return 'FENCED' end
end

redis.call('HDEL', KEYS[2], '') -- first what Redis allows when memory is full: see deliver
local answered, ordered = {}, false
for r = 1, tonumber(ARGV[7]) do
  local at = 3 + 5 * r
  local key, kind, ticket, payload = KEYS[tonumber(ARGV[at + 1])], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4]
  ordered = ordered or ticket ~= ''
  if redis.call('HSETNX', KEYS[2], 'answered:' .. ARGV[at], '1') == 1 then
    deliver_in_order(KEYS[4], ticket, key, kind, payload, ARGV[4])
    answered[#answered + 1] = tonumber(ARGV[at])
  end
end
if ordered then release(KEYS[3], KEYS[4]) end
if ARGV[6] ~= '' then redis.call('HINCRBY', KEYS[2], 'started:' .. ARGV[6], 1) end
redis.call('PEXPIRE', KEYS[2], ARGV[5])
return answered
