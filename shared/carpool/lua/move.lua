-- move(held, slot, what): the request that has this slot is elsewhere now, or done (order.lua). Whether there is
-- such a slot. HDEL and HSETNX, and not HSET, which by an ACL of Redis 6 could change any hash of a batcher's. O(1).
local function move(held, slot, what)
  return redis.pcall('HDEL', held, slot) == 1 and redis.pcall('HSETNX', held, slot, what) == 1
end

