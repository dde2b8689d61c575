-- What an operator does is written to the audit of the model, or of nodes, by the script that does it.
--
-- GRANT admin,console,control audit,nodes_audit xadd

-- write_audit(audit, actor, action, details): `actor` is who, by which way, and the maximum length of the audit;
-- `details` a table of texts by name. O(details).
local function write_audit(audit, actor, action, details)
  redis.call('XADD', audit, 'MAXLEN', '~', actor[3], '*', 'who', actor[1], 'via', actor[2], 'action', action,
    'details', cjson.encode(details))
end

-- of_change(before, after): what became of a value, for people; nil for none.
local DETAIL_BYTES_MAX = 500
local function of_change(before, after)
  return string.sub(before or 'none', 1, DETAIL_BYTES_MAX) .. ' -> ' .. string.sub(after or 'none', 1, DETAIL_BYTES_MAX)
end

local function now_in_ms()
  local time = redis.call('TIME')
  return string.format('%.0f', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
end
