cat given.txt >> words.txt
