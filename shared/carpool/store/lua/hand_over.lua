-- hand_over: a worker that stops gives up batches, so that others reclaim them at once. Their owner becomes a consumer
-- that is no worker, and their idle time that of a lease long over. The delivery count is lowered by what reclaiming
-- raises it: nobody died, so no request is a suspect.
--
-- KEYS  1 batches   2 the stream of the worker's version, if it has one
-- ARGV  1 consumer  2 idle time (ms)  3.. batch ID and epoch of each batch
-- Returns the number of batches that were handed over; the others belong to other workers. O(batches).
-- GRANT worker batches xclaim
local count = 0
for i = 3, #ARGV, 2 do
  local id = entry_of(ARGV[i])
  local stream = id == ARGV[i] and KEYS[1] or KEYS[2]
  if owns_batch(stream, ARGV[1], id, ARGV[i + 1]) then
    redis.call('XCLAIM', stream, 'workers', 'handed-over', 0, id, 'IDLE', ARGV[2],
      'RETRYCOUNT', tonumber(ARGV[i + 1]) - 1, 'JUSTID')
    count = count + 1
  end
end
return count
