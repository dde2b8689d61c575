-- renew: a model process is alive: extend its lease, and its ownership of the batches it holds.
-- XCLAIM alone would steal a batch that was taken over: owner and epoch are looked at first. JUSTID does not
-- raise the delivery count, which is the epoch.
--
-- KEYS  1 workers   2 batches   3 the model's registration
-- ARGV  1 consumer  2 lease (ms)  3.. batch ID and epoch of each batch held
-- Returns 1 if the model is registered (0: someone emptied Redis), then the IDs of batches that were lost
-- O(batches held).
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
-- First what Redis allows when memory is full: see deliver.
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', '(' .. string.format('%.0f', now_ms - 10 * tonumber(ARGV[2])))
redis.call('ZADD', KEYS[1], now_ms + tonumber(ARGV[2]), ARGV[1])

local reply = { redis.call('EXISTS', KEYS[3]) }
for i = 3, #ARGV, 2 do
  local pending = redis.pcall('XPENDING', KEYS[2], 'workers', ARGV[i], ARGV[i], 1)
  local owner = not pending.err and pending[1]
  if owner and owner[2] == ARGV[1] and owner[4] == tonumber(ARGV[i + 1]) then
    redis.call('XCLAIM', KEYS[2], 'workers', ARGV[1], 0, ARGV[i], 'JUSTID')
  else
    reply[#reply + 1] = ARGV[i]
  end
end
return reply
