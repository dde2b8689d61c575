-- deliver(key, kind, payload, ttl_ms): write one result where its producer looks for it.
--   kind 'list'    RPUSH an envelope on the result's own list
--   kind 'stream'  XADD one entry, field `results`, on a reply stream; what is older than the TTL is trimmed
-- A key that a producer made of another type, or a stream whose IDs it used up, gets nothing: its own loss, and
-- nobody else's, for what comes after in the script must be done. O(1).
-- Callers write something that Redis allows when memory is full (XDEL, XACK) before they deliver: from then
-- on the whole script may, so that a full Redis can still be emptied.
local function deliver(key, kind, payload, ttl_ms)
  local reply
  if kind == 'stream' then
    local now_ms = tonumber(redis.call('TIME')[1]) * 1000
    reply = redis.pcall('XADD', key, 'MINID', '~', string.format('%.0f', now_ms - ttl_ms), '*',
      'results', payload)
  else
    reply = redis.pcall('RPUSH', key, payload)
  end
  if type(reply) == 'table' and reply.err then
    if string.find(reply.err, 'WRONGTYPE', 1, true) or string.find(reply.err, 'exhausted', 1, true) then return end
    error(reply.err)
  end
  redis.call('PEXPIRE', key, ttl_ms)
end

