-- move(held, ticket, what): the request that has this ticket is elsewhere now, or done (order.lua). Whether there is
-- such a ticket. A result in it stays: who else says this ticket forged it. HDEL and HSETNX, and not HSET, which by
-- an ACL of Redis 6 could change any hash of a batcher's. O(1).
local function move(held, ticket, what)
  local was = redis.pcall('HGET', held, ticket)
  if type(was) ~= 'string' or string.sub(was, 1, 1) == 'r' then return false end
  return redis.pcall('HDEL', held, ticket) == 1 and redis.pcall('HSETNX', held, ticket, what) == 1
end
