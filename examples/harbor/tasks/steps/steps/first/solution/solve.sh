echo apple > words.txt
