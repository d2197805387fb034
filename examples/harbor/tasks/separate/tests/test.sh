#!/bin/bash
answer=0 notes=0 alone=0
[ "$(cat /app/answer.txt)" = 42 ] && answer=1
[ -s /logs/artifacts/notes.txt ] && notes=1
[ "$(ls /app)" = answer.txt ] && alone=1
echo "{\"reward\": $((answer * notes)), \"answer\": $answer, \"notes\": $notes, \"alone\": $alone}" \
    > /logs/verifier/reward.json
