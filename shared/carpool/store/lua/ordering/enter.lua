-- enter_order(order, tickets, arrivals): put tickets of entries at the end of the order: `arrivals` is ID SIZE ID SIZE
-- ... Those that are in the order already stay where they are, so repeating it changes nothing. O(entries).
-- GRANT batcher order lindex rpush
-- GRANT batcher tickets hdel hsetnx
local function enter_order(order, tickets, arrivals)
  local last = redis.pcall('LINDEX', order, -1)
  local last_size, before = string.match(type(last) == 'string' and last or '', ' (%d+) (%d+)$')
  before = last_size and last_size + before or 0
  local elements, ids = {}, {}
  for id, size in string.gmatch(arrivals, '(%S+) (%d+)') do
    if redis.pcall('HSETNX', tickets, id, size) == 1 then
      ids[#ids + 1] = id
      elements[#elements + 1] = string.format('%s %s %.0f', id, size, before)
      before = before + size
    end
  end

  local is_pushed = true
  for start = 1, #elements, 1000 do
    local pushed = redis.pcall('RPUSH', order, unpack(elements, start, math.min(#elements, start + 999)))
    is_pushed = is_pushed and type(pushed) == 'number'
  end
  if not is_pushed then -- the key `order` has another type: do without the order
    for _, id in ipairs(ids) do redis.pcall('HDEL', tickets, id) end
  end
end
