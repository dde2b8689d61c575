-- commit: write the results of a batch, remove it from `batches` and announce it in `settled`, all or nothing. The
-- same script writes the dead letters of its requests that were given up.
--
-- A request that was answered ahead of the commit (see answer.lua) must not get a second result. If the caller did not
-- leave all of these out, nothing is written: the reply names them, and the caller commits again without them.
--
-- KEYS  1 the stream of this batch   2 settled   3 progress of this batch   4 dead   5 order   6 tickets   7 statistics
--       8.. the keys of results and of stored bodies
-- ARGV  1 consumer  2 batch ID  3 epoch  4 result TTL (ms)  5 number of requests  6 execution time (us)
--       7 number of requests executed together  8 time that the batch waited for a model process (us)
--       9 time for which it occupied the process beside its execution (us)
--       10 maximum length of `settled`, 11 of `dead`
--       12 IDs of the sequences that are broken, separated by spaces; without those that were answered ahead
--       what the statistics count (see statistics.lua): 13 number of results that are OK, 14 their time from arrival,
--       15 in the queue; 16 number of errors, 17 their time from arrival; 18 time before, 19 in and 20 after the model
--       (us)
--       21.. list of positions left out
--           list of fields that the entry of `settled` has besides, if requests failed
--           list of stored bodies to delete: index in KEYS
--           list of results: index in KEYS, kind, ranges of tickets or '', payload
--           list of dead letters: list of fields
--           changes of sequences (see sequence.lua)
-- Returns { 'SETTLED' }
--       | { 'SETTLED_MORE' }  settled, and more withheld results can be delivered: run `release`
--       | { 'FENCED' }        the consumer does not own the batch any more; nothing was written
--       | { 'ANSWERED', positions that must be left out ... }  nothing was written
-- O(results), and O(bytes) for the payloads. A batch has `max_batch_size` results at most.
-- GRANT worker batches xack xdel
-- GRANT worker body unlink
-- GRANT worker settled xadd
-- GRANT worker dead xadd
-- GRANT worker progress hget hkeys del
if not owns_batch(KEYS[1], ARGV[1], ARGV[2], ARGV[3]) then return { 'FENCED' } end

local take = argument_reader(21)
local left_out = {}
for _ = 1, tonumber(take()) do left_out[take()] = true end
local more = take_list(take)
local answered, progress = { 'ANSWERED' }, redis.call('HKEYS', KEYS[3])
local broken = { ARGV[12] ~= '' and ARGV[12] or nil }
for _, field in ipairs(progress) do
  local position = string.match(field, '^answered:(%d+)$')
  if position then
    if not left_out[position] then answered[#answered + 1] = tonumber(position) end
    broken[#broken + 1] = string.match(redis.call('HGET', KEYS[3], field), '^broken (.*)')
  end
end
if #answered > 1 then return answered end

-- From here on no command may raise, because what was written before it would stay. So writes to keys that may have
-- another type use pcall, and such a key gets nothing. XACK is first because Redis allows it when memory is full:
-- see deliver.lua.
redis.call('XACK', KEYS[1], 'workers', entry_of(ARGV[2]))
redis.call('XDEL', KEYS[1], entry_of(ARGV[2]))
if #progress > 0 then redis.call('DEL', KEYS[3]) end
for _ = 1, tonumber(take()) do redis.pcall('UNLINK', KEYS[tonumber(take())]) end
local now = redis.call('TIME')  -- a batcher may read the entry later
local settled_us = now[1] .. string.format('%06d', now[2])
if #broken > 0 then
  more[#more + 1] = 'broken'
  more[#more + 1] = table.concat(broken, ' ')
end
redis.pcall('XADD', KEYS[2], 'MAXLEN', '~', ARGV[10], '*', 'batch', ARGV[2], 'worker', ARGV[1], 'size', ARGV[5],
  'compute_us', ARGV[6], 'executed', ARGV[7], 'waited_us', ARGV[8], 'overhead_us', ARGV[9],
  'settled_us', settled_us, unpack(more))
if ARGV[13] ~= '0' then
  count_batches(KEYS[7], ARGV[13], 1, ARGV[14], ARGV[15], ARGV[18], ARGV[19], ARGV[20], settled_us)
end
if ARGV[16] ~= '0' then count_failed(KEYS[7], ARGV[16], ARGV[17]) end
local arrived = {}
for _ = 1, tonumber(take()) do
  local key, kind, ranges, payload = KEYS[tonumber(take())], take(), take(), take()
  take_result(arrived, ranges, key, kind, payload, ARGV[4])
end
for _ = 1, tonumber(take()) do
  redis.pcall('XADD', KEYS[4], 'MAXLEN', '~', ARGV[11], '*', unpack(take_list(take)))
end
change_sequences(take, true)
if #arrived > 0 and release(KEYS[5], KEYS[6], arrived) then return { 'SETTLED_MORE' } end
return { 'SETTLED' }
