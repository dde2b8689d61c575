-- answer: write the results of some requests of a batch in flight ahead of the batch's commit, each at most once.
-- A batcher does this when a deadline passes, wherever the batch is. A worker does it when the results are too large
-- for one commit, and when a worker or model process may have died of a request. The requests are then executed one
-- at a time: a finished result survives the next death, and the number of starts shows which request is the cause.
--
-- KEYS  1 the stream of this batch   2 its progress   3 order   4 tickets   5 statistics   6.. the keys of results
-- ARGV  1 caller, 'worker' or 'batcher'  2 batch ID  3 consumer and  4 epoch ('' for a batcher)
--       5 result TTL (ms)  6 progress TTL (ms)  7 position that the worker starts next, '' for none
--       8 how many starts of it there are then: the worker counts, so that a repeated call counts none twice
--       9 time before, 10 in and 11 after the model, that these results took (us): see statistics.lua
--       12.. list of results: position in the batch, index in KEYS, kind, ranges of tickets or '', payload, '1' if it
--           is OK else '', time from arrival, time in the queue (us), and the changes of sequences (see sequence.lua),
--           at most one
-- Returns { 'ANSWERED', positions written now ... }
--       | { 'FENCED' }   worker: it does not own the batch any more; nothing was written
--       | { 'SETTLED' }  batcher: the batch was committed, or deleted by hand; nothing was written
-- A result that breaks a sequence is recorded with the ID of the sequence, for the commit.
-- O(results), of which a batcher gives 1,000 at most; for a batcher also O(bytes of the batch).
-- GRANT batcher batches xrange
-- GRANT batcher,worker progress hdel hset hsetnx pexpire
if ARGV[1] == 'batcher' then
  local id = entry_of(ARGV[2])
  if #redis.call('XRANGE', KEYS[1], id, id) == 0 then return { 'SETTLED' } end
elseif not owns_batch(KEYS[1], ARGV[3], ARGV[2], ARGV[4]) then
  return { 'FENCED' }
end

redis.call('HDEL', KEYS[2], '') -- must be the first write: see deliver.lua
local take = argument_reader(12)
local reply, arrived = { 'ANSWERED' }, {}
local succeeded, success_us, queue_us, failed, fail_us = 0, 0, 0, 0, 0
for _ = 1, tonumber(take()) do
  local position, key, kind, ranges, payload = take(), KEYS[tonumber(take())], take(), take(), take()
  local is_ok, total_us, in_queue_us = take() ~= '', take(), take()
  local field = 'answered:' .. position
  local is_first = redis.call('HSETNX', KEYS[2], field, '1') == 1
  if is_first then
    take_result(arrived, ranges, key, kind, payload, ARGV[5])
    reply[#reply + 1] = tonumber(position)
    if is_ok then
      succeeded, success_us, queue_us = succeeded + 1, success_us + total_us, queue_us + in_queue_us
    else
      failed, fail_us = failed + 1, fail_us + total_us
    end
  end
  local broken = change_sequences(take, is_first)
  if broken then redis.call('HSET', KEYS[2], field, 'broken ' .. broken) end
end
if succeeded > 0 then
  local now = redis.call('TIME')
  local now_us = now[1] .. string.format('%06d', now[2])
  count_batches(KEYS[5], succeeded, 1, success_us, queue_us, ARGV[9], ARGV[10], ARGV[11], now_us)
end
if failed > 0 then count_failed(KEYS[5], failed, fail_us) end
if #arrived > 0 then release(KEYS[3], KEYS[4], arrived) end
if ARGV[7] ~= '' then redis.call('HSET', KEYS[2], 'started:' .. ARGV[7], ARGV[8]) end
redis.call('PEXPIRE', KEYS[2], ARGV[6])
return reply
