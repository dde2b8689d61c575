-- release: deliver what a script before had to leave (order.lua), and free the first tickets as long as nobody is in
-- them: their entry was withdrawn by XDEL, or their batch was deleted by hand, and those behind would wait for ever.
--
-- KEYS  1 order   2 held; and 3 requests   4 batches, where lost tickets are to be freed
-- Returns 1 if there is more to do, or else where the request of the first ticket is ('': nobody has a ticket).
-- O(results delivered + tickets freed), O(bytes) of the results, and where lost tickets are to be freed of the entry or
-- batch that the first ticket names: ask rarely.
redis.pcall('HDEL', KEYS[2], '') -- first what Redis allows when memory is full: see deliver
if release(KEYS[1], KEYS[2]) == 1 then return 1 end

local function is_lost(what)
  local where, id = string.sub(what, 1, 1), string.sub(what, 2)
  if where == 'w' then return #redis.call('XRANGE', KEYS[3], id, id) == 0 end
  if where == 'b' then return #redis.call('XRANGE', KEYS[4], id, id) == 0 end
  return true
end

for _ = 1, 1000 do
  local ticket = redis.pcall('LINDEX', KEYS[1], 0)
  if type(ticket) ~= 'string' then return '' end
  local what = redis.pcall('HGET', KEYS[2], ticket)
  what = type(what) == 'string' and what or '?'
  if string.sub(what, 1, 1) == 'r' then return 1 end
  if not KEYS[3] or not is_lost(what) then return what end
  redis.call('LPOP', KEYS[1])
  redis.pcall('HDEL', KEYS[2], ticket)
end
return 1
