-- move(held, slot, what): the request that has this slot is elsewhere now, or done (order.lua). Whether there is
-- such a slot. A result in it stays: who else says this slot forged it. HDEL and HSETNX, and not HSET, which by
-- an ACL of Redis 6 could change any hash of a batcher's. O(1).
local function move(held, slot, what)
  local was = redis.pcall('HGET', held, slot)
  if type(was) ~= 'string' or string.sub(was, 1, 1) == 'r' then return false end
  return redis.pcall('HDEL', held, slot) == 1 and redis.pcall('HSETNX', held, slot, what) == 1
end
