-- release: deliver what a script before had to leave (order.lua), and free the first slot if nobody is in it:
-- its entry was withdrawn by XDEL, or its batch was deleted by hand, and those behind it would wait for ever.
--
-- KEYS  1 order   2 held; and 3 requests   4 batches, where lost slots are to be freed
-- Returns 1 if there is more to do. O(results delivered), O(bytes) of them, and of the entry or
-- batch that the first slot names.
if release(KEYS[1], KEYS[2]) == 1 then return 1 end
local slot = KEYS[3] and redis.call('LINDEX', KEYS[1], 0)
if not slot then return 0 end

local what = redis.call('HGET', KEYS[2], slot) or ''
local where, id = string.sub(what, 1, 1), string.sub(what, 2)
local there = false
if where == 'w' then
  there = #redis.call('XRANGE', KEYS[3], id, id) > 0
elseif where == 'b' then
  there = #redis.call('XRANGE', KEYS[4], id, id) > 0
end
if there then return 0 end
redis.call('LPOP', KEYS[1])
redis.call('HDEL', KEYS[2], slot)
return 1
