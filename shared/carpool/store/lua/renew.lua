-- renew: extend the lease of a model process, and of the batches that it fetched and has not committed.
-- XCLAIM alone would take back a batch that another worker reclaimed, so owner and epoch are checked first. With
-- JUSTID it does not raise the delivery count, which is the epoch.
--
-- KEYS  1 workers   2 batches   3 the model's registration   4 the stream of the worker's version, if it has one
-- ARGV  1 consumer  2 lease (ms)  3 '1' to renew a lease that ran out, too, else ''  4.. batch ID and epoch of each
--       batch
-- Returns { 1 if the model is registered, 0 if not (such as after Redis was emptied); 1 if the process had a lease, 0
--           if that ran out; the number of live model processes; then the IDs of lost batches }
-- O(batches + log processes).
-- GRANT worker workers zadd zscore zcount zremrangebyscore
-- GRANT worker batches xpending xclaim
-- GRANT worker registration exists
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local had_lease = tonumber(redis.call('ZSCORE', KEYS[1], ARGV[1]) or 0) >= now_ms
-- ZREMRANGEBYSCORE must be the first write: see deliver.lua.
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', '(' .. string.format('%.0f', now_ms - 10 * tonumber(ARGV[2])))
if had_lease or ARGV[3] ~= '' then redis.call('ZADD', KEYS[1], now_ms + tonumber(ARGV[2]), ARGV[1]) end

local live = redis.call('ZCOUNT', KEYS[1], now_ms, '+inf')
local reply = { redis.call('EXISTS', KEYS[3]), had_lease and 1 or 0, live }
for i = 4, #ARGV, 2 do
  local id = entry_of(ARGV[i])
  local stream = id == ARGV[i] and KEYS[2] or KEYS[4]
  local pending = redis.pcall('XPENDING', stream, 'workers', id, id, 1)
  local owner = not pending.err and pending[1]
  if owner and owner[2] == ARGV[1] and owner[4] == tonumber(ARGV[i + 1]) then
    redis.call('XCLAIM', stream, 'workers', ARGV[1], 0, id, 'JUSTID')
  else
    reply[#reply + 1] = ARGV[i]
  end
end
return reply
