#!/bin/bash
[ "$(cat /app/largest.txt)" = 3 ]
echo $((1 - $?)) > /logs/verifier/reward.txt
